//! Names of threads.

/// The maximum length of a thread's name in bytes. Linux shows 15 of them, and a panic message shows all.
const MOST: usize = 64;

/// Derives a thread's name from a user's name. A NUL would make [`std::thread::Builder`] panic and other control
/// characters would garble lists of threads, so these are removed; the length is limited.
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
