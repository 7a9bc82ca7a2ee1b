//! Manifests for Kubernetes: text, so that a person can read and change it.
//!
//! A node is a pod that runs `ferrospeed launch`, which finds its place by torchrun's variables (`PET_*`, [`pod`](crate::pod)): those
//! that Kubeflow's trainer sets too. Pods find the first one by the name that a headless Service gives it. A pod whose ranks
//! saved and left (75), or that was evicted, is begun again; any other failure counts.

use super::Request;

const PORT: u16 = 29_500;

/// A string of YAML: JSON's are.
fn text(value: &str) -> String {
    serde_json::Value::from(value).to_string()
}

fn list(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| text(word)).collect();
    format!("[{}]", words.join(", "))
}

pub(super) fn manifests(request: &Request) -> String {
    match request.min_nodes {
        None => [
            secret(request),
            service(request, &format!("batch.kubernetes.io/job-name: {}", request.name)),
            job(request),
        ]
        .join("---\n"),
        Some(min_nodes) => {
            let leader = format!("{}-leader", request.name);
            let service = service(request, &format!("batch.kubernetes.io/job-name: {leader}"));
            [secret(request), service, leader_job(request, &leader, min_nodes), agents(request)].join("---\n")
        }
    }
}

fn secret(request: &Request) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata:\n  name: {name}-token\nstringData:\n  token: {token}\n",
        name = request.name,
        token = text(&request.token)
    )
}

/// Gives pods names, from the moment that they have addresses.
fn service(request: &Request, selector: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  clusterIP: None\n  publishNotReadyAddresses: true\n  selector:\n    {selector}\n",
        name = request.name
    )
}

/// What ranks exit with that saved and left, and what a node's end does, costs no attempt.
const POLICY: &str = "  podFailurePolicy:
    rules:
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
    - action: Ignore
      onExitCodes:
        operator: In
        values: [75]
";

fn job(request: &Request) -> String {
    let Request { name, nodes, .. } = request;
    let first = format!("{name}-0.{name}");
    let env = places(request, &first, "metadata.annotations['batch.kubernetes.io/job-completion-index']");
    let pod = pod(request, "    ", &launch(request), &env);
    format!(
        "apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {name}\nspec:\n  completionMode: Indexed\n  completions: {nodes}\n  parallelism: {nodes}\n  backoffLimit: {limit}\n{POLICY}  template:\n{pod}",
        limit = 3 * nodes
    )
}

pub(super) fn job_set(request: &Request) -> String {
    let Request { name, nodes, .. } = request;
    // JobSet names pods after the set, the replicated job, its number and theirs.
    let first = format!("{name}-node-0-0.{name}");
    let env = places(request, &first, "metadata.annotations['batch.kubernetes.io/job-completion-index']");
    let pod = pod(request, "          ", &launch(request), &env);
    let policy: String = POLICY.lines().map(|line| format!("      {line}\n")).collect();
    [
        secret(request),
        format!(
            "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata:\n  name: {name}\nspec:\n  failurePolicy:\n    maxRestarts: 3\n  replicatedJobs:\n  - name: node\n    replicas: 1\n    template:\n      spec:\n        completionMode: Indexed\n        completions: {nodes}\n        parallelism: {nodes}\n        backoffLimit: 0\n{policy}        template:\n{pod}"
        ),
    ]
    .join("---\n")
}

pub(super) fn train_job(request: &Request) -> String {
    let Request { name, nodes, ranks_per_node, .. } = request;
    // Its runtime sets PET_* for every pod.
    let resources = match request.gpus {
        true => format!("    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: {ranks_per_node}\n"),
        false => String::new(),
    };
    [
        secret(request),
        format!(
            "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nmetadata:\n  name: {name}\nspec:\n  runtimeRef:\n    name: torch-distributed\n  trainer:\n    numNodes: {nodes}\n    numProcPerNode: {ranks_per_node}\n    image: {image}\n    command: {command}\n{resources}    env:\n{token}",
            image = text(&request.image),
            command = list(&launch(request)),
            token = token_variable(request, "    "),
        ),
    ]
    .join("---\n")
}

/// The pod that leads an elastic job.
fn leader_job(request: &Request, leader: &str, min_nodes: u32) -> String {
    let Request { nodes, executable, .. } = request;
    let mut words = vec![executable.clone()];
    let port = PORT.to_string();
    let name = format!("{leader}-0.{}", request.name);
    let options = [
        "launch",
        "--elastic_training",
        "--no_agents",
        "--min_nodes",
        &min_nodes.to_string(),
        "--max_nodes",
        &nodes.to_string(),
        "--master_addr",
        &name,
        "--master_port",
        &port,
        "--",
    ]
    .map(str::to_owned);
    words.extend(options);
    words.extend(request.words());
    let without_gpus = Request { gpus: false, ..request.clone() };
    let pod = pod(&without_gpus, "    ", &words, &token_variable(request, "      "));
    format!(
        "apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {leader}\nspec:\n  completionMode: Indexed\n  completions: 1\n  parallelism: 1\n  backoffLimit: 3\n{POLICY}  template:\n{pod}"
    )
}

/// The pods of its nodes: each is begun again wherever there is room, and joins.
fn agents(request: &Request) -> String {
    let Request { name, nodes, ranks_per_node, executable, .. } = request;
    let meet = format!("{name}-leader-0.{name}:{PORT}");
    let mut words = vec![executable.clone()];
    words.extend(
        [
            "agent",
            "--meet",
            &meet,
            "--wait_s",
            "600",
            &request.grace(),
            "-n",
            &ranks_per_node.to_string(),
            "--",
        ]
        .map(str::to_owned),
    );
    words.extend(request.words());
    let pod = pod(request, "    ", &words, &token_variable(request, "      "));
    format!(
        "apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {name}\nspec:\n  completionMode: Indexed\n  completions: {nodes}\n  parallelism: {nodes}\n  backoffLimit: 1000\n{POLICY}  template:\n{pod}"
    )
}

/// What a pod of a fixed job runs.
fn launch(request: &Request) -> Vec<String> {
    let mut words = vec![request.executable.clone(), "launch".to_owned(), request.grace(), "--".to_owned()];
    words.extend(request.words());
    words
}

/// The variables by which a pod knows its place.
fn places(request: &Request, first: &str, index_field: &str) -> String {
    let Request { nodes, ranks_per_node, .. } = request;
    let value = |name: &str, value: &str| format!("      - name: {name}\n        value: {}\n", text(value));
    [
        value("PET_NNODES", &nodes.to_string()),
        value("PET_NPROC_PER_NODE", &ranks_per_node.to_string()),
        format!("      - name: PET_NODE_RANK\n        valueFrom:\n          fieldRef:\n            fieldPath: {index_field}\n"),
        value("PET_MASTER_ADDR", first),
        value("PET_MASTER_PORT", &PORT.to_string()),
        token_variable(request, "      "),
    ]
    .concat()
}

fn token_variable(request: &Request, indent: &str) -> String {
    let lines = [
        "- name: FERROSPEED_JOB_TOKEN".to_owned(),
        "  valueFrom:".to_owned(),
        "    secretKeyRef:".to_owned(),
        format!("      name: {}-token", request.name),
        "      key: token".to_owned(),
    ];
    lines.iter().map(|line| format!("{indent}{line}\n")).collect()
}

/// A pod's template; `env` is written for an indent of six.
fn pod(request: &Request, indent: &str, command: &[String], env: &str) -> String {
    let mut lines = vec![
        "spec:".to_owned(),
        format!("  subdomain: {}", request.name),
        "  restartPolicy: Never".to_owned(),
        // Time to save: as long as Slurm's notice.
        format!("  terminationGracePeriodSeconds: {}", request.notice_s),
        "  containers:".to_owned(),
        "  - name: node".to_owned(),
        format!("    image: {}", text(&request.image)),
        format!("    command: {}", list(command)),
        "    workingDir: /workspace".to_owned(),
    ];
    if request.gpus {
        lines.extend(["    resources:", "      limits:"].map(str::to_owned));
        lines.push(format!("        nvidia.com/gpu: {}", request.ranks_per_node));
    }
    lines.push("    env:".to_owned());
    lines.extend(env.lines().map(|line| line.strip_prefix("  ").unwrap_or(line).to_owned()));
    // Ranks of a pod talk through shared memory, of which containers have 64 MiB.
    lines.extend(
        ["    volumeMounts:", "    - name: shared-memory", "      mountPath: /dev/shm"].map(str::to_owned),
    );
    if request.claim.is_some() {
        lines.extend(["    - name: workspace", "      mountPath: /workspace"].map(str::to_owned));
    }
    lines.extend(
        ["  volumes:", "  - name: shared-memory", "    emptyDir:", "      medium: Memory"].map(str::to_owned),
    );
    if let Some(claim) = &request.claim {
        lines.extend(["  - name: workspace", "    persistentVolumeClaim:"].map(str::to_owned));
        lines.push(format!("      claimName: {}", text(claim)));
    }
    lines.iter().map(|line| format!("{indent}{line}\n")).collect()
}
