//! Formatting for logs and error messages.

use super::backend::Endpoint;

/// `512 B`, `4.0 MiB`, `139 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value < 100.0 { format!("{value:.1} {}", UNITS[unit]) } else { format!("{value:.0} {}", UNITS[unit]) }
}

/// `1 envelope`, `2 envelopes`.
pub(crate) fn count(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The direction of a copy: `to device`, `to host`, `on the device`, `on the host`.
pub(crate) fn direction(to: Endpoint, from: Endpoint) -> &'static str {
    match (to, from) {
        (Endpoint::Device(_), Endpoint::Host(_)) => "to device",
        (Endpoint::Host(_), Endpoint::Device(_)) => "to host",
        (Endpoint::Device(_), Endpoint::Device(_)) => "on the device",
        (Endpoint::Host(_), Endpoint::Host(_)) => "on the host",
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn byte_counts_are_formatted_with_their_unit() {
        assert_eq!(super::bytes(512), "512 B");
        assert_eq!(super::bytes(4 << 20), "4.0 MiB");
        assert_eq!(super::bytes(139 << 30), "139 GiB");
    }

    #[test]
    fn counts_have_the_right_number() {
        assert_eq!([0, 1, 2].map(|of| super::count(of, "message")), ["0 messages", "1 message", "2 messages"]);
    }
}
