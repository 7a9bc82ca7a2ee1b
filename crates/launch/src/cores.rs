//! Core binding: which cores and which memory each rank of a node may use.
//!
//! The cores of a node are dealt out in equal runs, one run per rank. The memory policy follows from where the
//! run lies: one NUMA node binds to it, a flat high-bandwidth-memory machine prefers the paired node that has
//! memory but no cores, and NUMA nodes that repeat one core list count as one.

use crate::error::{LaunchError, shorten};

const MAX_CORE: u32 = 65_535;

/// Where a rank may run and allocate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The cores.
    pub cores: Vec<u32>,
    /// The memory policy.
    pub memory: MemoryPolicy,
}

/// Which NUMA nodes a rank's memory comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryPolicy {
    /// Wherever the system likes.
    Anywhere,
    /// Only from these nodes.
    Bind(Vec<u32>),
    /// From this node while it has room.
    Prefer(u32),
}

/// Parses a core list: ascending numbers and ranges, `0,2-4,6`.
pub fn parse_core_list(list: &str) -> Result<Vec<u32>, LaunchError> {
    let refuse = |reason| LaunchError::CoreList { list: shorten(list), reason };
    let number = |part: &str| {
        let value = part.trim().parse::<u32>();
        value.map_err(|_| refuse("a range is a number or two numbers joined by a dash"))
    };
    let mut cores: Vec<u32> = Vec::new();
    for part in list.split(',') {
        let (start, end) = match part.split_once('-') {
            Some((start, end)) => (number(start)?, number(end)?),
            None => (number(part)?, number(part)?),
        };
        if end < start {
            return Err(refuse("a range ends before it starts"));
        }
        if end > MAX_CORE {
            return Err(refuse("core numbers end at 65535"));
        }
        if cores.last().is_some_and(|&last| start <= last) {
            return Err(refuse("ranges must ascend and must not overlap"));
        }
        cores.extend(start..=end);
    }
    Ok(cores)
}

/// Writes cores in order, with runs as ranges: `0-2,4`.
pub fn compress(cores: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &core in cores {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == core => *end = core,
            _ => ranges.push((core, core)),
        }
    }
    let text = ranges.iter().map(|(start, end)| match start == end {
        true => start.to_string(),
        false => format!("{start}-{end}"),
    });
    text.collect::<Vec<_>>().join(",")
}

/// Deals `cores` out to `ranks` ranks and says what rank `local_rank` gets.
///
/// `numa_cores[n]` lists the cores of NUMA node `n`.
pub fn bind(
    cores: &[u32],
    numa_cores: &[Vec<u32>],
    ranks: usize,
    local_rank: usize,
) -> Result<Binding, LaunchError> {
    let per_rank = cores.len().checked_div(ranks).unwrap_or(0);
    let first = local_rank.saturating_mul(per_rank);
    let mine = cores.get(first..first.saturating_add(per_rank)).unwrap_or_default();
    if mine.is_empty() {
        return Err(LaunchError::TooFewCores { ranks, cores: cores.len() });
    }
    Ok(Binding { cores: mine.to_vec(), memory: memory_policy(mine, numa_cores) })
}

fn memory_policy(cores: &[u32], numa_cores: &[Vec<u32>]) -> MemoryPolicy {
    let with_cores: Vec<usize> = (0..numa_cores.len()).filter(|&node| !numa_cores[node].is_empty()).collect();
    let without: Vec<usize> = (0..numa_cores.len()).filter(|&node| numa_cores[node].is_empty()).collect();
    let holds_all = |node: usize| cores.iter().all(|core| numa_cores[node].contains(core));
    let Some(position) = with_cores.iter().position(|&node| holds_all(node)) else {
        return MemoryPolicy::Anywhere;
    };
    let node = with_cores[position];
    if without.len() == with_cores.len() {
        return MemoryPolicy::Prefer(without[position] as u32);
    }
    let same_run = (node..numa_cores.len()).take_while(|&other| numa_cores[other] == numa_cores[node]);
    MemoryPolicy::Bind(same_run.map(|node| node as u32).collect())
}

impl Binding {
    /// The `numactl` prefix that does the same, for backends that start ranks themselves.
    pub fn numactl(&self) -> Vec<String> {
        let mut words = vec!["numactl".to_owned()];
        match &self.memory {
            MemoryPolicy::Anywhere => {}
            MemoryPolicy::Bind(nodes) => {
                let nodes = nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
                words.extend(["-m".to_owned(), nodes]);
            }
            MemoryPolicy::Prefer(node) => words.extend(["-p".to_owned(), node.to_string()]),
        }
        words.extend(["-C".to_owned(), compress(&self.cores)]);
        words
    }
}

/// The cores and NUMA nodes of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// One logical core per physical core, those this process may use.
    pub cores: Vec<u32>,
    /// The cores of each NUMA node.
    pub numa_cores: Vec<Vec<u32>>,
}

impl Topology {
    /// Reads this machine's topology from `/sys`.
    pub fn read() -> Self {
        let allowed = allowed_cores();
        let first_sibling = |core: u32| {
            let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
            let siblings =
                std::fs::read_to_string(path).ok().and_then(|list| parse_core_list(list.trim()).ok());
            siblings
                .and_then(|list| list.into_iter().find(|sibling| allowed.contains(sibling)))
                .unwrap_or(core)
        };
        let cores = allowed.iter().copied().filter(|&core| first_sibling(core) == core).collect();
        let numa_cores: Vec<Vec<u32>> = (0..1024)
            .map_while(|node| {
                std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()
            })
            .map(|list| parse_core_list(list.trim()).unwrap_or_default())
            .collect();
        Topology { cores, numa_cores }
    }
}

fn allowed_cores() -> Vec<u32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let listed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    if let Some(Ok(cores)) = listed.map(|list| parse_core_list(list.trim())) {
        return cores;
    }
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    (0..count as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores() {
        assert!(!Topology::read().cores.is_empty());
    }

    #[test]
    fn an_absurd_range_is_refused_before_memory_is_spent_on_it() {
        assert!(parse_core_list("0-4294967295").is_err());
    }

    #[test]
    fn zero_ranks_do_not_divide_by_zero() {
        assert!(bind(&[0, 1], &[vec![0, 1]], 0, 0).is_err());
    }
}
