//! The memory of this process.

/// The resident memory of this process, in bytes.
#[cfg(target_os = "linux")]
pub(crate) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the status of the process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the resident memory");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

/// Not available on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn resident() -> u64 {
    0
}
