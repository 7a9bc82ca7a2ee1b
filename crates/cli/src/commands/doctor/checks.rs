//! The checks themselves, from the processor outwards.

use std::path::PathBuf;

use ferrospeed_launch::{cores::Topology, probe, surroundings};
use ferrospeed_tune::plan::Operands;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::{Check, Verdict};

const GIB: f64 = (1u64 << 30) as f64;
const SHARED_MEMORY_WANTED_BYTES: u64 = 512 << 20;
const OPEN_FILES_WANTED: u64 = 4096;

pub(super) fn all(paths: &[PathBuf]) -> Vec<Check> {
    let mut checks = cpu();
    checks.extend(memory());
    checks.extend(limits());
    checks.extend(disks(paths));
    checks.extend(accelerators());
    checks.extend(launchers());
    checks
}

fn check(topic: &'static str, name: &str, verdict: Verdict, found: impl Into<String>) -> Check {
    Check { topic, name: name.to_owned(), verdict, found: found.into(), advice: None }
}

impl Check {
    fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
}

/// What products of this host copy first, which takes memory.
pub(in crate::commands) fn operands() -> Operands {
    Operands::of_host(ferrospeed_cpu::multiplies_in_tiles(), ferrospeed_cpu::widens_operands())
}

fn cpu_field(info: &str, name: &str) -> Option<String> {
    let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
    line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
}

fn cpu() -> Vec<Check> {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| cpu_field(&info, name);
    let topology = Topology::read();
    let numa = topology.numa_cores.len().max(1);
    let model = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let flags = field("flags").or_else(|| field("Features")).unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|have| have == flag);
    let interesting =
        ["avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve"];
    let found: Vec<&str> = interesting.into_iter().filter(|flag| has(flag)).collect();
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    let features = match found.is_empty() {
        false => check("CPU", "vector units", Verdict::Good, found.join(" ")),
        true => check("CPU", "vector units", Verdict::Limited, "none that kernels are written for")
            .advise("runs use the portable kernels, which are much slower"),
    };
    let cores = format!("{} cores, {logical} threads, {numa} NUMA node(s)", topology.cores.len());
    vec![check("CPU", "model", Verdict::Good, model), check("CPU", "usable", Verdict::Good, cores), features]
}

fn memory() -> Vec<Check> {
    const TOPIC: &str = "Memory";
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / GIB);
    let mut checks = vec![match probe::host_memory() {
        Some(host) => {
            let found = format!("{} available of {}", gib(host.available_bytes), gib(host.total_bytes));
            check(TOPIC, "host", Verdict::Good, found)
        }
        None => check(TOPIC, "host", Verdict::Limited, "/proc/meminfo does not say"),
    }];
    if let Some(limit_bytes) = probe::container_limit_bytes() {
        checks.push(check(TOPIC, "container limit", Verdict::Good, gib(limit_bytes)));
    }
    checks.push(match nix::sys::statvfs::statvfs("/dev/shm") {
        Ok(room) => {
            let bytes = room.blocks() * room.fragment_size();
            let found = format!("{:.1} GiB", bytes as f64 / GIB);
            match bytes < SHARED_MEMORY_WANTED_BYTES {
                true => check(TOPIC, "/dev/shm", Verdict::Limited, found)
                    .advise("ranks of one host exchange data there; give a container --shm-size=1g or more"),
                false => check(TOPIC, "/dev/shm", Verdict::Good, found),
            }
        }
        Err(error) => check(TOPIC, "/dev/shm", Verdict::Limited, error.desc())
            .advise("ranks of one host fall back to slower ways to exchange data"),
    });
    checks
}

fn limits() -> Vec<Check> {
    const TOPIC: &str = "Limits";
    let show = |value: u64| if value == RLIM_INFINITY { "unlimited".to_owned() } else { value.to_string() };
    let soft = |resource| getrlimit(resource).map(|(soft, _)| soft).ok();
    let mut checks = Vec::new();
    if let Some(files) = soft(Resource::RLIMIT_NOFILE) {
        let found = check(TOPIC, "open files", Verdict::Good, show(files));
        checks.push(match files < OPEN_FILES_WANTED {
            true => Check { verdict: Verdict::Limited, ..found }
                .advise(format!("many ranks or shards need more: `ulimit -n {OPEN_FILES_WANTED}`")),
            false => found,
        });
    }
    if let Some(bytes) = soft(Resource::RLIMIT_MEMLOCK) {
        let found = check(TOPIC, "locked memory", Verdict::Good, show(bytes));
        checks.push(match bytes < 64 << 20 {
            true => Check { verdict: Verdict::Limited, ..found }
                .advise("pinned buffers for offloading need more: `ulimit -l unlimited`"),
            false => found,
        });
    }
    if let Some(processes) = soft(Resource::RLIMIT_NPROC) {
        checks.push(check(TOPIC, "processes", Verdict::Good, show(processes)));
    }
    if let Some(bytes) = soft(Resource::RLIMIT_AS).filter(|&bytes| bytes != RLIM_INFINITY) {
        let found = format!("{:.1} GiB", bytes as f64 / GIB);
        let text = "mapped checkpoints and shared buffers count too: `ulimit -v unlimited`";
        checks.push(check(TOPIC, "address space", Verdict::Limited, found).advise(text));
    }
    checks
}

fn disks(paths: &[PathBuf]) -> Vec<Check> {
    const TOPIC: &str = "Disks";
    let mut checks = vec![match probe::io_uring() {
        Ok(()) => check(TOPIC, "io_uring", Verdict::Good, "works"),
        Err(reason) => {
            check(TOPIC, "io_uring", Verdict::Limited, reason).advise("file I/O falls back to threads")
        }
    }];
    let usual = [std::env::current_dir().unwrap_or_else(|_| PathBuf::from(".")), std::env::temp_dir()];
    for folder in usual.iter().chain(paths) {
        let name = folder.display().to_string();
        let asked_for = paths.contains(folder);
        checks.push(match probe::probe_disk(folder) {
            Err(reason) => {
                let verdict = if asked_for { Verdict::Bad } else { Verdict::Limited };
                check(TOPIC, &name, verdict, reason)
            }
            Ok(disk) => {
                let free = disk.free_bytes as f64 / GIB;
                let room =
                    format!("{}, {free:.1} of {:.1} GiB free", disk.kind, disk.total_bytes as f64 / GIB);
                match disk.direct_io {
                    Ok(()) => check(TOPIC, &name, Verdict::Good, format!("{room}, O_DIRECT works")),
                    Err(reason) => {
                        check(TOPIC, &name, Verdict::Limited, format!("{room}, no O_DIRECT: {reason}"))
                            .advise("offloading to this disk goes through the page cache")
                    }
                }
            }
        });
    }
    checks
}

fn accelerators() -> Vec<Check> {
    const TOPIC: &str = "Accelerators";
    let library = |name: &str, found: Result<String, String>| match found {
        Ok(found) => check(TOPIC, name, Verdict::Good, found),
        Err(reason) => check(TOPIC, name, Verdict::Limited, format!("not found: {reason}")),
    };
    let driver = match probe::cuda_driver() {
        Ok(driver) => {
            let (major, minor) = driver.version;
            let memory = driver.device_bytes.map(|bytes| format!(" of {:.1} GiB", bytes as f64 / GIB));
            let found =
                format!("CUDA {major}.{minor}, {} device(s){}", driver.devices, memory.unwrap_or_default());
            let verdict = if driver.devices > 0 { Verdict::Good } else { Verdict::Limited };
            check(TOPIC, "CUDA driver", verdict, found)
        }
        Err(reason) => check(TOPIC, "CUDA driver", Verdict::Limited, format!("not found: {reason}"))
            .advise("runs use the CPU"),
    };
    vec![
        driver,
        library("cuBLAS", probe::open_library(&["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"])),
        library("NCCL", probe::nccl_version()),
    ]
}

fn launchers() -> Vec<Check> {
    const TOPIC: &str = "Launchers";
    let program = |name: &str, purpose: &str| match surroundings::in_path(name) {
        true => check(TOPIC, name, Verdict::Good, "found"),
        false => check(TOPIC, name, Verdict::Limited, format!("not in PATH: {purpose}")),
    };
    let mpi = match probe::open_library(&["libmpi.so.40", "libmpi.so.12", "libmpi.so"]) {
        Ok(name) => check(TOPIC, "MPI library", Verdict::Good, name),
        Err(reason) => check(TOPIC, "MPI library", Verdict::Limited, format!("not found: {reason}")),
    };
    vec![
        program("ssh", "no other host can be reached"),
        program("pdsh", "needed for `launch --launcher pdsh` on several hosts"),
        program("mpirun", "needed for `launch --launcher openmpi|mpich|impi|mvapich`"),
        program("srun", "needed for `launch --launcher slurm`"),
        mpi,
    ]
}
