//! The memory of this process.

/// Bytes that it has in the machine's memory.
#[cfg(target_os = "linux")]
pub(crate) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("what Linux says of the process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its resident memory");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

/// Not known here.
#[cfg(not(target_os = "linux"))]
pub(crate) fn resident() -> u64 {
    0
}
