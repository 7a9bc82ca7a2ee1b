//! A job as a file for who schedules it: a script for Slurm, manifests for Kubernetes.
//!
//! Pure functions: what is written depends on the request alone, and nothing is asked of a cluster. A run that is told that its
//! time is over saves and ends with 75; what is written here takes that for "begin me again", and nothing else.

mod kubernetes;
mod slurm;

use crate::error::LaunchError;
use crate::shell::quote;

/// For whom a job is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Slurm: a script for `sbatch`.
    Slurm,
    /// Kubernetes: an indexed Job with a headless Service.
    Kubernetes,
    /// Kubernetes with JobSet: a JobSet of one replicated Job.
    JobSet,
    /// Kubernetes with Kubeflow's trainer: a TrainJob for its `torch-distributed` runtime.
    Kubeflow,
}

impl Target {
    /// Parses a `--write` value.
    pub fn parse(name: &str) -> Result<Target, LaunchError> {
        match name {
            "slurm" => Ok(Target::Slurm),
            "k8s" | "kubernetes" => Ok(Target::Kubernetes),
            "jobset" => Ok(Target::JobSet),
            "kubeflow" => Ok(Target::Kubeflow),
            _ => Err(LaunchError::Usage(format!(
                "--write {name:?}: known are slurm, k8s, jobset and kubeflow; `--launcher slurm --write` is slurm"
            ))),
        }
    }
}

/// What is to be written.
#[derive(Debug, Clone)]
pub struct Request {
    /// What the job is called.
    pub name: String,
    /// Nodes; of an elastic job the most.
    pub nodes: u32,
    /// Of an elastic job the fewest.
    pub min_nodes: Option<u32>,
    /// Ranks of a node.
    pub ranks_per_node: u32,
    /// Whether each rank has a GPU.
    pub gpus: bool,
    /// How many jobs after each other, each going on with the run of the one before.
    pub array: Option<u32>,
    /// Seconds before its end at which a job is told.
    pub notice_s: u32,
    /// The image of containers.
    pub image: String,
    /// A volume claim that all pods mount at `/workspace`.
    pub claim: Option<String>,
    /// Further options for the scheduler, one word each.
    pub options: Vec<String>,
    /// The job's token, for what has no other way to agree on one.
    pub token: String,
    /// This executable, as the nodes call it.
    pub executable: String,
    /// The program and its arguments.
    pub program: Vec<String>,
}

/// Writes a job.
pub fn write(target: Target, request: &Request) -> Result<String, LaunchError> {
    let refuse = |text: String| Err(LaunchError::Usage(text));
    if request.nodes == 0 || request.ranks_per_node == 0 {
        return refuse("--write: a job has at least one node and one rank".to_owned());
    }
    if !is_name(&request.name) {
        return refuse(format!(
            "--job_name {:?}: up to 40 lower-case letters, digits and dashes, beginning with a letter and not ending with a dash, are a name for every scheduler",
            request.name
        ));
    }
    let is_kubernetes = target != Target::Slurm;
    if is_kubernetes && !request.options.is_empty() {
        return refuse("--launcher_args: manifests have no such options; edit what is written".to_owned());
    }
    if is_kubernetes && request.array.is_some() {
        return refuse("--array is Slurm's; a Job of Kubernetes is begun again by itself".to_owned());
    }
    if request.min_nodes.is_some() && matches!(target, Target::JobSet | Target::Kubeflow) {
        return refuse(
            "--min_nodes: jobset and kubeflow start a fixed number of nodes; use --write k8s".to_owned(),
        );
    }
    Ok(match target {
        Target::Slurm => slurm::script(request),
        Target::Kubernetes => kubernetes::manifests(request),
        Target::JobSet => kubernetes::job_set(request),
        Target::Kubeflow => kubernetes::train_job(request),
    })
}

/// Names of hosts are made of it, so it is one (RFC 1123), with room for what is added.
fn is_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=40).contains(&name.len())
        && name.bytes().all(is_inner)
        && name.as_bytes()[0].is_ascii_lowercase()
        && !name.ends_with('-')
}

impl Request {
    /// The program; a run of ours goes on with what an earlier attempt has saved.
    fn words(&self) -> Vec<String> {
        let mut words = self.program.clone();
        let program = words.first().and_then(|first| first.rsplit('/').next());
        let is_train = program == Some("ferrospeed") && words.get(1).is_some_and(|word| word == "train");
        let says = |option: &str| self.program.iter().any(|word| word.split('=').next() == Some(option));
        if is_train && !says("--resume") && !says("--overwrite") {
            words.push("--resume".to_owned());
        }
        words
    }

    /// How long ranks may take to save: nearly all of the notice.
    fn grace(&self) -> String {
        format!("--grace_s={}", self.notice_s.saturating_sub(10).max(1))
    }

    fn command(&self) -> String {
        self.words().iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
    }
}
