//! The memory of this host, and of the container that this process is in.

use std::path::Path;

/// What the system says of the host's memory.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory {
    /// All of it.
    pub total_bytes: u64,
    /// What programs may still have.
    pub available_bytes: u64,
}

/// The host's memory; `None` where the system does not say.
pub fn host_memory() -> Option<HostMemory> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |name: &str| {
        let rest = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(rest.split_whitespace().next()?.parse::<u64>().ok()?.saturating_mul(1024))
    };
    Some(HostMemory { total_bytes: bytes("MemTotal")?, available_bytes: bytes("MemAvailable")? })
}

/// What the container allows, where there is a limit.
pub fn container_limit_bytes() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let folders = [format!("/sys/fs/cgroup{path}"), "/sys/fs/cgroup".to_owned()];
    folders.iter().find_map(|folder| {
        std::fs::read_to_string(Path::new(folder).join("memory.max")).ok()?.trim().parse().ok()
    })
}

/// Host memory that a run may use now: what is available, within the container's limit.
pub fn available_memory_bytes() -> Option<u64> {
    let available = host_memory()?.available_bytes;
    Some(container_limit_bytes().map_or(available, |limit| available.min(limit)))
}
