//! Names of threads.

/// Bytes of a thread's name at most. Linux shows 15 of them, a panic's message all.
const MOST: usize = 64;

/// A name for a thread, made of a user's: a NUL in it would be a panic of [`std::thread::Builder`], other control characters
/// would garble what lists threads, and it may be of any length.
pub(crate) fn thread_name(name: impl AsRef<str>) -> String {
    let mut known = String::new();
    for char in name.as_ref().chars().filter(|char| !char.is_control()) {
        if known.len() + char.len_utf8() > MOST {
            break;
        }
        known.push(char);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::{MOST, thread_name};

    #[test]
    fn any_name_names_a_thread() {
        assert_eq!(thread_name("upper"), "upper");
        assert_eq!(thread_name("a\0b\r\n\u{1b}c"), "abc");
        assert_eq!(thread_name("\0"), "");
        let long = thread_name("é".repeat(1000));
        assert!(long.len() <= MOST && long.chars().all(|char| char == 'é'));
        for name in ["", "\0", "a\0b", &"x".repeat(1 << 20), "é\u{0}\u{85}"] {
            std::thread::Builder::new().name(thread_name(name)).spawn(|| ()).unwrap().join().unwrap();
        }
    }
}
