//! The `mpirun`s: OpenMPI, MPICH, Intel MPI and MVAPICH, which start the ranks themselves.

use super::{Built, Job, words};
use crate::cores::{self, Topology};
use crate::error::LaunchError;
use crate::node::JOB_TOKEN_VARIABLE;
use crate::options::{Backend, Interpreter};

pub(super) fn openmpi(job: &Job<'_>) -> Result<Built, LaunchError> {
    job.refuse_filters(Backend::OpenMpi)?;
    job.refuse_node_launcher_options(Backend::OpenMpi)?;
    let mut command = words(["mpirun", "-n"]);
    command.push(job.total_ranks().to_string());
    command.extend(["-hostfile".to_owned(), job.options.hostfile.clone()]);
    // OpenMPI refuses a parameter that is given twice: what the user chooses replaces the default.
    let chosen = |names: &[&str]| job.backend_args.iter().any(|word| names.contains(&word.as_str()));
    if !chosen(&["btl"]) {
        command.extend(words(["--mca", "btl", "^openib"]));
    }
    if !chosen(&["btl_tcp_if_include", "btl_tcp_if_exclude"]) {
        command.extend(words(["--mca", "btl_tcp_if_include", "eth0"]));
    }
    command.extend(job.backend_args.iter().cloned());
    command.extend(words(["-x", "UCX_TLS=tcp"]));
    for (name, value) in &job.exports {
        command.extend(["-x".to_owned(), format!("{name}={value}")]);
    }
    for name in ["MASTER_ADDR", "MASTER_PORT", JOB_TOKEN_VARIABLE] {
        command.extend(words(["-x", name]));
    }
    command.extend(job.options.program_words(&job.python));
    Ok(Built { command, environment: job.environment_with_meeting_point(), ..Built::default() })
}

pub(super) fn mpich(job: &Job<'_>) -> Result<Built, LaunchError> {
    job.refuse_filters(Backend::Mpich)?;
    job.refuse_node_launcher_options(Backend::Mpich)?;
    let per_node = job.even_slots(Backend::Mpich)?;
    let mut command = words(["mpirun", "-n"]);
    command.push(job.total_ranks().to_string());
    command.extend(["-ppn".to_owned(), per_node.to_string()]);
    command.extend(job.backend_args.iter().cloned());
    for (name, value) in &job.exports {
        command.extend(["-genv".to_owned(), format!("{name}={value}")]);
    }
    command.extend(meeting_point(job, per_node));
    command.extend(["-hosts".to_owned(), job.hosts()]);
    // MPICH numbers its ranks in variables of its own: `rank-env` translates them and becomes the program.
    command.extend([job.executable.clone(), "rank-env".to_owned()]);
    command.extend(words(["--launcher", "mpich"]));
    match job.options.interpreter {
        Interpreter::Direct => command.push("--no_python".to_owned()),
        Interpreter::PythonModule => command.push("--module".to_owned()),
        Interpreter::PythonScript => {}
    }
    command.push(job.options.program.clone());
    command.extend(job.options.args.iter().cloned());
    Ok(Built { command, environment: job.environment_with_meeting_point(), ..Built::default() })
}

pub(super) fn intel_mpi(job: &Job<'_>) -> Result<Built, LaunchError> {
    job.refuse_filters(Backend::IntelMpi)?;
    job.refuse_node_launcher_options(Backend::IntelMpi)?;
    let per_node = job.even_slots(Backend::IntelMpi)?;
    let bindings = intel_bindings(job, per_node)?;
    let mut command = words(["mpirun", "-ppn"]);
    command.push(per_node.to_string());
    command.extend(job.backend_args.iter().cloned());
    for (name, value) in &job.exports {
        command.extend(["-genv".to_owned(), name.clone(), value.clone()]);
    }
    if let Some(binding) = bindings.first() {
        command.extend(["-genv".to_owned(), "OMP_NUM_THREADS".to_owned(), binding.cores.len().to_string()]);
    }
    command.extend(meeting_point(job, per_node));
    command.extend(words(["-genv", "I_MPI_PIN", "0", "-hosts"]));
    command.push(job.hosts());
    for rank in 0..job.total_ranks() {
        if rank > 0 {
            command.push(":".to_owned());
        }
        let local_rank = rank % per_node.max(1);
        command.extend(words(["-n", "1", "-env", "RANK"]));
        command.extend([
            rank.to_string(),
            "-env".to_owned(),
            "LOCAL_RANK".to_owned(),
            local_rank.to_string(),
        ]);
        command.extend(bindings.get(local_rank).map(cores::Binding::numactl).unwrap_or_default());
        command.extend(job.options.program_words(&job.python));
    }
    Ok(Built { command, environment: job.environment_with_meeting_point(), ..Built::default() })
}

/// The binding of each local rank, by this host's topology: Intel MPI runs need equal hosts anyway.
fn intel_bindings(job: &Job<'_>, per_node: usize) -> Result<Vec<cores::Binding>, LaunchError> {
    let Some(binding) = &job.node.binding else { return Ok(Vec::new()) };
    if job.environment.contains_key("KMP_AFFINITY") {
        return Err(LaunchError::KmpAffinity);
    }
    let topology = Topology::read();
    let listed = binding.core_list.as_deref().map(cores::parse_core_list).transpose()?;
    let usable = listed.as_ref().unwrap_or(&topology.cores);
    (0..per_node).map(|rank| cores::bind(usable, &topology.numa_cores, per_node, rank)).collect()
}

pub(super) fn mvapich(job: &Job<'_>) -> Result<Built, LaunchError> {
    job.refuse_filters(Backend::Mvapich)?;
    job.refuse_node_launcher_options(Backend::Mvapich)?;
    let per_node = job.even_slots(Backend::Mvapich)?;
    let mut command = words(["mpirun", "-np"]);
    command.push(job.total_ranks().to_string());
    command.extend(["-ppn".to_owned(), per_node.to_string()]);
    command.extend(["--hostfile".to_owned(), job.scratch_hostfile.clone()]);
    command.extend(job.backend_args.iter().cloned());
    // MVAPICH2-GDR's own recommendations for deep learning.
    let tuning = [
        "MV2_SMP_USE_CMA=0",
        "MV2_DEBUG_SHOW_BACKTRACE=1",
        "MV2_USE_CUDA=1",
        "MV2_SUPPORT_DL=1",
        "MV2_ENABLE_AFFINITY=0",
        "MV2_INTER_ALLGATHER_TUNING=5",
        "MV2_CUDA_USE_NAIVE=0",
    ];
    let exports = job.exports.iter().map(|(name, value)| format!("{name}={value}"));
    for assignment in tuning.map(str::to_owned).into_iter().chain(exports) {
        command.extend(["-env".to_owned(), assignment]);
    }
    command.extend(job.options.program_words(&job.python));
    let hosts: String = job.pool.keys().map(|host| format!("{host}\n")).collect();
    Ok(Built {
        command,
        environment: job.environment_with_meeting_point(),
        files: vec![(job.scratch_hostfile.clone(), hosts)],
        ..Built::default()
    })
}

fn meeting_point(job: &Job<'_>, per_node: usize) -> Vec<String> {
    let values = [
        ("MASTER_ADDR", job.node.master_addr.clone()),
        ("MASTER_PORT", job.node.master_port.to_string()),
        ("WORLD_SIZE", job.total_ranks().to_string()),
        ("LOCAL_SIZE", per_node.to_string()),
    ];
    values.into_iter().flat_map(|(name, value)| ["-genv".to_owned(), name.to_owned(), value]).collect()
}
