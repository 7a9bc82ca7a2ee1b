//! Jobs as files for schedulers: manifests are read back as YAML, scripts are held against what they must say.

use ferrospeed_launch::write::{Request, Target, write};
use saphyr::{LoadableYamlNode, Yaml};

fn request() -> Request {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect();
    Request {
        name: "train".to_owned(),
        nodes: 4,
        min_nodes: None,
        ranks_per_node: 8,
        gpus: true,
        array: None,
        notice_s: 120,
        image: "registry/ferrospeed:1".to_owned(),
        claim: Some("shared".to_owned()),
        options: Vec::new(),
        token: "0123".to_owned(),
        executable: "ferrospeed".to_owned(),
        program: words("ferrospeed train recipe.toml --out run"),
    }
}

/// The documents of a text, each a mapping.
fn documents(text: &str) -> Vec<Yaml<'_>> {
    let all = Yaml::load_from_str(text).unwrap_or_else(|error| panic!("{error}:\n{text}"));
    assert!(all.iter().all(|document| document.is_mapping()), "{text}");
    all
}

/// What lies at a path of keys; numbers are places in lists.
fn at<'a>(document: &'a Yaml<'a>, path: &str) -> &'a Yaml<'a> {
    path.split('/').fold(document, |node, key| match key.parse::<usize>() {
        Ok(place) => {
            node.as_sequence().and_then(|list| list.get(place)).unwrap_or_else(|| panic!("no {path}"))
        }
        Err(_) => node.as_mapping_get(key).unwrap_or_else(|| panic!("no {key} of {path}: {node:?}")),
    })
}

fn text<'a>(document: &'a Yaml<'a>, path: &str) -> &'a str {
    at(document, path).as_str().unwrap_or_else(|| panic!("{path} is no text"))
}

fn list<'a>(document: &'a Yaml<'a>, path: &str) -> Vec<&'a str> {
    at(document, path).as_sequence().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

/// The value of a container's variable, or the field that it comes from.
fn variable<'a>(container: &'a Yaml<'a>, name: &str) -> &'a str {
    let all = at(container, "env").as_sequence().unwrap();
    let one = all.iter().find(|one| text(one, "name") == name).unwrap_or_else(|| panic!("no {name}"));
    match one.as_mapping_get("value") {
        Some(value) => value.as_str().unwrap(),
        None if one.as_mapping_get("valueFrom").unwrap().as_mapping_get("fieldRef").is_some() => {
            text(one, "valueFrom/fieldRef/fieldPath")
        }
        None => text(one, "valueFrom/secretKeyRef/name"),
    }
}

#[test]
fn an_indexed_job_of_kubernetes_has_a_service_a_secret_and_torchruns_variables() {
    let written = write(Target::Kubernetes, &request()).unwrap();
    let [secret, service, job] = &documents(&written)[..] else { panic!("{written}") };
    assert_eq!((text(secret, "kind"), text(secret, "stringData/token")), ("Secret", "0123"));
    assert_eq!((text(service, "kind"), text(service, "spec/clusterIP")), ("Service", "None"));
    let selector = at(service, "spec/selector").as_mapping_get("batch.kubernetes.io/job-name");
    assert_eq!(selector.and_then(Yaml::as_str), Some("train"));
    assert_eq!(
        (text(job, "spec/completionMode"), at(job, "spec/completions").as_integer()),
        ("Indexed", Some(4))
    );
    let pod = at(job, "spec/template/spec");
    assert_eq!((text(pod, "subdomain"), text(pod, "restartPolicy")), ("train", "Never"));
    let container = at(pod, "containers/0");
    let command = [
        "ferrospeed",
        "launch",
        "--grace_s=110",
        "--",
        "ferrospeed",
        "train",
        "recipe.toml",
        "--out",
        "run",
        "--resume",
    ];
    assert_eq!(list(container, "command"), command);
    assert_eq!(variable(container, "PET_MASTER_ADDR"), "train-0.train");
    assert_eq!((variable(container, "PET_NNODES"), variable(container, "PET_NPROC_PER_NODE")), ("4", "8"));
    assert!(variable(container, "PET_NODE_RANK").contains("job-completion-index"));
    assert_eq!(variable(container, "FERROSPEED_JOB_TOKEN"), "train-token");
    let gpus = at(container, "resources/limits").as_mapping_get("nvidia.com/gpu");
    assert_eq!(gpus.and_then(Yaml::as_integer), Some(8));
    assert_eq!(text(pod, "volumes/1/persistentVolumeClaim/claimName"), "shared");
}

#[test]
fn an_elastic_job_of_kubernetes_is_a_leader_and_agents_that_call_it() {
    let written =
        write(Target::Kubernetes, &Request { min_nodes: Some(2), claim: None, ..request() }).unwrap();
    let [_, _, leader, agents] = &documents(&written)[..] else { panic!("{written}") };
    let leads = list(leader, "spec/template/spec/containers/0/command").join(" ");
    assert!(
        leads.starts_with("ferrospeed launch --elastic_training --no_agents --min_nodes 2 --max_nodes 4"),
        "{leads}"
    );
    assert!(
        leads.contains("--master_addr train-leader-0.train --master_port 29500 -- ferrospeed train"),
        "{leads}"
    );
    let agent = list(agents, "spec/template/spec/containers/0/command").join(" ");
    assert!(agent.starts_with("ferrospeed agent --meet train-leader-0.train:29500"), "{agent}");
    assert!(agent.ends_with("-n 8 -- ferrospeed train recipe.toml --out run --resume"), "{agent}");
}

#[test]
fn a_job_set_and_a_train_job_follow_their_schemas() {
    let written = write(Target::JobSet, &request()).unwrap();
    let [_, set] = &documents(&written)[..] else { panic!("{written}") };
    assert_eq!(text(set, "apiVersion"), "jobset.x-k8s.io/v1alpha2");
    let job = at(set, "spec/replicatedJobs/0/template/spec");
    assert_eq!(at(job, "parallelism").as_integer(), Some(4));
    assert_eq!(variable(at(job, "template/spec/containers/0"), "PET_MASTER_ADDR"), "train-node-0-0.train");
    let written = write(Target::Kubeflow, &request()).unwrap();
    let [_, job] = &documents(&written)[..] else { panic!("{written}") };
    assert_eq!((text(job, "kind"), text(job, "spec/runtimeRef/name")), ("TrainJob", "torch-distributed"));
    let trainer = at(job, "spec/trainer");
    assert_eq!(
        (at(trainer, "numNodes").as_integer(), at(trainer, "numProcPerNode").as_integer()),
        (Some(4), Some(8))
    );
    assert_eq!(variable(trainer, "FERROSPEED_JOB_TOKEN"), "train-token");
}

#[test]
fn words_of_any_kind_stay_words_of_a_manifest() {
    let program: Vec<String> =
        ["./run", "a: b", "- c", "\"quoted\"", "#no comment", "$(HOME)", "line\nbreak", "ünï"]
            .map(str::to_owned)
            .into();
    let written = write(Target::Kubernetes, &Request { program: program.clone(), ..request() }).unwrap();
    let all = documents(&written);
    let command = list(&all[2], "spec/template/spec/containers/0/command");
    assert_eq!(&command[4..], program.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn a_script_for_sbatch_has_notice_requeue_and_what_was_asked_for() {
    let asked = Request { array: Some(5), options: vec!["--time=04:00:00".to_owned()], ..request() };
    let script = write(Target::Slurm, &asked).unwrap();
    for line in [
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --array=1-5%1",
        "#SBATCH --time=04:00:00",
        "srun --kill-on-bad-exit=0 ferrospeed train recipe.toml --out run --resume &",
    ] {
        assert!(script.lines().any(|found| found == line), "no '{line}' in:\n{script}");
    }
    let script = write(Target::Slurm, &Request { min_nodes: Some(1), gpus: false, ..request() }).unwrap();
    assert!(
        script.contains("#SBATCH --no-kill") && script.contains("#SBATCH --ntasks-per-node=1"),
        "{script}"
    );
    assert!(
        script.contains("ferrospeed agent --meet \"$MASTER_ADDR:$MASTER_PORT\" --grace_s=110 -n 8 --"),
        "{script}"
    );
    assert!(!script.contains("gpus"), "{script}");
}

#[test]
fn what_no_scheduler_takes_is_refused_with_what_to_do() {
    let refused = |target, request: Request| write(target, &request).unwrap_err().to_string();
    assert!(
        refused(Target::Slurm, Request { name: "My Job".to_owned(), ..request() }).contains("lower-case")
    );
    assert!(refused(Target::Kubernetes, Request { array: Some(2), ..request() }).contains("Slurm's"));
    assert!(refused(Target::JobSet, Request { min_nodes: Some(2), ..request() }).contains("--write k8s"));
    assert!(refused(Target::Slurm, Request { nodes: 0, ..request() }).contains("at least one node"));
    assert!(Target::parse("pbs").unwrap_err().to_string().contains("slurm, k8s, jobset and kubeflow"));
}
