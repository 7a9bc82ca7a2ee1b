//! The recorded cases that begin with a command line: options, front-end plans, node launches.
//!
//! [`TRANSLATION`] says how a recorded command line becomes ours, [`OURS`] where we differ on purpose. Both are
//! recognised by what a case asks, never by its number, so another set of the same schema is judged alike.

use clap::Parser;
use ferrospeed_command::Failure;
use ferrospeed_launch::cores::Topology;
use ferrospeed_launch::exports::Environment;
use ferrospeed_launch::node::{FOLLOWER_VARIABLE, JOB_TOKEN_VARIABLE, Machine};
use ferrospeed_launch::plan::{LaunchPlan, Surroundings, plan};
use ferrospeed_launch::{Backend, LaunchError, LaunchOptions, shell, world_info};
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

use super::launch::{Autotuning, LaunchArgs};
use super::node_launch::NodeLaunchArgs;
use super::{Cli, Command};

/// How words of a recorded command line become ours.
const TRANSLATION: [(&[&str], &[&str]); 4] = [
    (&["PYTHON", "-u", "-m", "deepspeed.launcher.launch"], &["FERROSPEED", "node-launch"]),
    (&["PYTHON", "-u", "-m", "LAUNCHER_DIR/launcher_helper.py"], &["FERROSPEED", "rank-env"]),
    (&["PYTHON", "-u", "LAUNCHER_DIR/launcher_helper.py"], &["FERROSPEED", "rank-env"]),
    (&["LAUNCHER_DIR/launcher_helper.py"], &["FERROSPEED", "rank-env"]),
];

/// Where we differ on purpose: what the recording does, and what we do.
const OURS: [(&str, &str); 13] = [
    ("LOCAL_RANK is RANK modulo the slots of the node", "it is the position within the node"),
    ("--master_addr is overwritten with 127.0.0.1 without a hostfile", "it is honoured"),
    ("CUDA_VISIBLE_DEVICES with UUIDs fails", "the named devices are the slots"),
    (
        "srun gets filters it does not know, and all slots as -n",
        "hosts by name, -n of the active slots; slots refused",
    ),
    ("srun ignores --module and --no_python", "they are honoured"),
    ("pdsh drops rank logs and core binding; other backends drop more", "pdsh forwards them; others refuse"),
    ("counts of 0 mean no limit, too many nodes are cut down", "refused"),
    ("no devices is an error even with --num_gpus", "ranks without a device run on the CPU"),
    (
        "options without effect or with a broken one are accepted",
        "refused: a core list or elastic limits alone, an unknown launcher on one host, --module with --no_python, odd names in an environment file",
    ),
    ("a `--` right after the program is dropped", "an executable gets it: it may mean something there"),
    ("pdsh waits for every host when one has failed", "the other hosts are stopped"),
    (
        "--launcher_args takes no word that begins with `-` unless written with `=`",
        "it takes the next word, whatever it is",
    ),
    ("the remote shell expands exported values and words without a space", "every word is quoted"),
];

fn translate(words: &[String]) -> Vec<String> {
    let mut translated = Vec::new();
    let mut rest = words;
    while let Some(first) = rest.first() {
        let rule = TRANSLATION.iter().find(|(recorded, _)| {
            rest.len() >= recorded.len() && rest.iter().zip(*recorded).all(|(a, b)| a == b)
        });
        match rule {
            Some((recorded, ours)) => {
                translated.extend(ours.iter().map(|word| (*word).to_owned()));
                rest = &rest[recorded.len()..];
            }
            None => {
                translated.push(first.clone());
                rest = &rest[1..];
            }
        }
    }
    translated
}

/// Takes out what only we say: the job's name, and for OpenMPI the meeting point and the token, both by name.
fn without_our_variables(words: &[String]) -> Vec<String> {
    assert!(words.iter().all(|word| !word.contains("TOKEN") || word == JOB_TOKEN_VARIABLE), "{words:?}");
    let mut kept: Vec<String> = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let next = words.as_slice().first().map(String::as_str);
        if word == "-x"
            && next.is_some_and(|name| ["MASTER_ADDR", "MASTER_PORT", JOB_TOKEN_VARIABLE].contains(&name))
        {
            words.next();
            continue;
        }
        if word != "--job_id=JOB" {
            kept.push(word.clone());
        }
    }
    kept
}

fn parse_launch(argv: &[String]) -> Result<LaunchArgs, clap::Error> {
    let words = ["ferrospeed", "launch"].into_iter().map(str::to_owned).chain(argv.iter().cloned());
    match Cli::try_parse_from(words)?.command {
        Command::Launch(args) => Ok(*args),
        other => panic!("parsed as {other:?}"),
    }
}

/// DeepSpeed's defaults: a Python script unless told otherwise, which gets `--local_rank` unless told otherwise.
fn with_deepspeed_defaults(args: &mut LaunchArgs) -> Result<LaunchOptions, Failure> {
    args.python = !args.no_python && !args.module;
    let mut options = args.to_options()?;
    options.pass_local_rank = !args.no_local_rank;
    Ok(options)
}

fn argv_of(case: &Value) -> Vec<String> {
    serde_json::from_value(case["argv"].clone()).expect("argv is a list of words")
}

/// OURS 11: the word after `--launcher_args` that DeepSpeed takes for another option.
fn dashed_launcher_args(argv: &[String]) -> Option<&str> {
    let word = argv.windows(2).find(|pair| pair[0] == "--launcher_args" && pair[1].starts_with('-'));
    // A word with a space is no option to it either.
    word.map(|pair| pair[1].as_str()).filter(|word| !word.contains(' '))
}

#[test]
fn golden_args() {
    golden().each_case("launcher/args.json", 7, |case| {
        let argv = argv_of(case);
        let parsed = parse_launch(&argv);
        if let (Some(word), Some(_)) = (dashed_launcher_args(&argv), case.get("error")) {
            let taken = parsed.map(|args| args.launcher_args);
            assert_eq!(taken.as_deref().ok(), Some(word), "{case}: {OURS:?}");
            return;
        }
        if let Some(error) = case.get("error") {
            let code = match parsed {
                Err(refused) => refused.exit_code(),
                Ok(args) => args.to_options().map_or_else(|refused| i32::from(refused.exit_code()), |_| 0),
            };
            assert_eq!(json!(code), error["code"], "{case}");
            return;
        }
        let args = parsed.unwrap_or_else(|error| panic!("{case}: {error}"));
        // OURS 9: only scripts lose a leading `--` here; every recorded program is one or counts as one.
        let arguments = &args.program[1..];
        let arguments = arguments.strip_prefix(&["--".to_owned()][..]).unwrap_or(arguments);
        let number = |value: Option<i64>| value.unwrap_or(-1);
        let found = json!({
            "hostfile": args.hostfile,
            "include": args.include,
            "exclude": args.exclude,
            "num_nodes": args.num_nodes.as_deref().map_or(-1, |text| text.parse::<i64>().unwrap()),
            "min_elastic_nodes": number(args.min_elastic_nodes),
            "max_elastic_nodes": number(args.max_elastic_nodes),
            "num_gpus": number(args.num_gpus),
            "master_port": args.master_port.unwrap_or(29500),
            "master_addr": args.master_addr,
            "launcher": args.launcher,
            "launcher_args": args.launcher_args,
            "module": args.module,
            "no_python": args.no_python,
            "no_local_rank": args.no_local_rank,
            "no_ssh_check": args.no_ssh_check,
            "force_multi": args.force_multi,
            "save_pid": args.save_pid,
            "enable_each_rank_log": args.enable_each_rank_log,
            "autotuning": match args.autotuning {
                None => "",
                Some(Autotuning::Tune) => "tune",
                Some(Autotuning::Run) => "run",
            },
            "elastic_training": args.elastic_training,
            "user_script": args.program[0],
            "user_args": arguments,
            "bind_cores_to_rank": args.bind_cores_to_rank,
            "bind_core_list": args.bind_core_list,
            "ssh_port": args.ssh_port,
        });
        assert_eq!(found, case["expect"], "{case}");
    });
}

/// The machine on which the cases were recorded.
struct Recorded<'a> {
    case: &'a Value,
}

impl Surroundings for Recorded<'_> {
    fn hostfile(&self, _: &str) -> Result<Option<String>, LaunchError> {
        Ok(self.case["hostfile"].as_str().map(str::to_owned))
    }
    fn environment(&self) -> Environment {
        serde_json::from_value(self.case["env"].clone()).expect("env is a map of text")
    }
    fn device_count(&self) -> u32 {
        self.case["device_count"].as_u64().expect("a device count") as u32
    }
    fn current_dir(&self) -> Result<String, LaunchError> {
        Ok("CWD".to_owned())
    }
    fn env_files(&self) -> Result<Vec<(String, String)>, LaunchError> {
        let file = self.case["deepspeed_env_file"]
            .as_str()
            .map(|text| (".deepspeed_env".to_owned(), text.to_owned()));
        Ok(file.into_iter().collect())
    }
    fn named_env_file(&self, path: &str) -> Result<String, LaunchError> {
        panic!("no recorded case names an environment file, but {path} was read");
    }
    /// The recording machine stood for every host.
    fn is_this_host(&self, _: &str) -> bool {
        true
    }
    fn check_ssh(&self, _: &str, _: Option<u16>) -> Result<(), LaunchError> {
        Ok(())
    }
    fn address_of(&self, _: &str, _: Option<u16>) -> Result<String, LaunchError> {
        Ok("10.1.2.3".to_owned())
    }
    fn backend_installed(&self, _: Backend) -> bool {
        self.case["backend_installed"].as_bool().expect("whether the backend is installed")
    }
    fn free_port(&self) -> Result<u16, LaunchError> {
        Ok(29500)
    }
    fn process_id(&self) -> u32 {
        4242
    }
    fn executable(&self) -> Result<String, LaunchError> {
        Ok("FERROSPEED".to_owned())
    }
    fn python(&self) -> String {
        "PYTHON".to_owned()
    }
    fn scratch_file(&self, name: &str) -> String {
        format!("/tmp/deepspeed_{name}")
    }
    fn job_token(&self) -> String {
        "TOKEN".to_owned()
    }

    fn job_id(&self) -> String {
        "JOB".to_owned()
    }
}

#[test]
fn golden_runner() {
    golden().each_case("launcher/runner.json", 55, |case| {
        let mut args = match parse_launch(&argv_of(case)) {
            Ok(args) => args,
            Err(error) => {
                assert_eq!(json!(error.exit_code()), case["error"]["code"], "{case}: {error}");
                return;
            }
        };
        if dashed_launcher_args(&argv_of(case)).is_some() && case["error"]["code"] == 2 {
            return;
        }
        let planned = with_deepspeed_defaults(&mut args).and_then(|mut options| {
            if case["hostfile"].is_string() {
                options.hostfile = "HOSTFILE".to_owned();
            }
            let planned = plan(&options, &Recorded { case });
            planned.map_err(|error| Failure::Usage(error.to_string())).map(|plan| (options, plan))
        });
        if refused_by_us(&args, case) {
            assert!(planned.is_err(), "{case}: {OURS:?}");
            return;
        }
        if let Some(message) = case["error"]["message"].as_str() {
            if accepted_by_us(&args, case, message) {
                planned.unwrap_or_else(|error| panic!("{case}: {error}: {OURS:?}"));
            } else {
                let refused =
                    planned.err().unwrap_or_else(|| panic!("accepted, but recorded as an error: {case}"));
                assert_eq!(refused.exit_code(), 2, "{case}: {refused}");
            }
            return;
        }
        let (options, planned) = planned.unwrap_or_else(|error| panic!("{case}: {error}"));
        compare_plan(case, &args, &options, &planned);
    });
}

/// What DeepSpeed accepts and drops, or passes on broken, and we refuse: rows 3, 5, 6 and 8 of [`OURS`].
fn refused_by_us(args: &LaunchArgs, case: &Value) -> bool {
    let hosts = case["hostfile"]
        .as_str()
        .map_or(0, |text| text.lines().filter(|line| line.contains("slots=")).count());
    let wanted = args.num_nodes.as_deref().and_then(|text| text.parse::<i64>().ok()).unwrap_or(-1);
    let started_with = case["expect"]["cmd"][0].as_str().unwrap_or_default();
    let dropped = args.enable_each_rank_log != "None"
        || args.save_pid
        || args.elastic_training
        || (args.bind_cores_to_rank && !args.launcher.eq_ignore_ascii_case("impi"));
    let env_file = case["deepspeed_env_file"].as_str().unwrap_or_default();
    let odd_name = |line: &str| {
        let name = line.split('=').next().unwrap_or_default().trim();
        !name.starts_with('#') && !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    (started_with == "srun" && format!("{}{}", args.include, args.exclude).contains(':'))
        || (["srun", "mpirun"].contains(&started_with) && dropped)
        || (started_with == "pdsh" && env_file.lines().any(odd_name))
        || Backend::parse(&args.launcher).is_err()
        || (args.module && args.no_python)
        || wanted == 0
        || args.num_gpus == Some(0)
        || (hosts > 0 && wanted > hosts as i64)
        || (args.bind_core_list.is_some() && !args.bind_cores_to_rank)
        || (!args.elastic_training && (args.min_elastic_nodes.is_some() || args.max_elastic_nodes.is_some()))
}

/// What DeepSpeed refuses and we can do: rows 2 and 7 of [`OURS`], and comments in environment files.
fn accepted_by_us(args: &LaunchArgs, case: &Value, message: &str) -> bool {
    let named_devices = case["env"]["CUDA_VISIBLE_DEVICES"].as_str().is_some_and(|devices| {
        devices
            .split(',')
            .any(|device| device.trim().starts_with("GPU-") || device.trim().starts_with("MIG-"))
    });
    let env_file = case["deepspeed_env_file"].as_str().unwrap_or_default();
    let only_comments = env_file.lines().all(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#') || line.contains('=')
    });
    let direct_elastic = args.elastic_training && args.no_python && args.no_local_rank;
    (named_devices && (message.contains("invalid literal") || message.contains("no GPU resources")))
        || (message.contains("no GPU resources") && args.num_gpus.is_some_and(|count| count > 0))
        || (message.contains("unpack") && only_comments)
        || (message.contains("not supported in Elastic") && direct_elastic)
}

fn compare_plan(case: &Value, args: &LaunchArgs, options: &LaunchOptions, planned: &LaunchPlan) {
    let recorded: Vec<String> = serde_json::from_value(case["expect"]["cmd"].clone()).expect("a command");
    let mut expected = translate(&recorded);
    if case["hostfile"].is_null() && !args.master_addr.is_empty() {
        // OURS 1
        let forced = expected.iter_mut().find(|word| *word == "--master_addr=127.0.0.1");
        *forced.expect("a forced address") = format!("--master_addr={}", args.master_addr);
    }
    let mut found = without_our_variables(&planned.command);
    if expected[0] == "srun" {
        adjust_slurm(args, options, &mut expected, &found);
    }
    if expected[0] == "pdsh" {
        // OURS 5: forwarded by us, so they must be there, and are taken out before comparing.
        let forwarded =
            |word: &String| word.starts_with("--enable_each_rank_log=") || word.starts_with("--bind_core");
        let wanted = usize::from(options.log_dir.is_some())
            + usize::from(options.bind_cores)
            + usize::from(options.core_list.is_some());
        assert_eq!(found.iter().filter(|word| forwarded(word)).count(), wanted, "{case}");
        found.retain(|word| !forwarded(word));
        expected.retain(|word| !forwarded(word));
    }
    if expected[0] == "pdsh" {
        // OURS 12: equal once both sides' quotes are taken off; theirs only quotes words with a space.
        found = found.iter().map(|word| without_quotes(&word.replace("%%", "%"))).collect();
        expected = expected.iter().map(|word| without_quotes(word)).collect();
    }
    assert_eq!(found, expected, "{case}");

    let collapse = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let added: Environment =
        serde_json::from_value(case["expect"].get("env_added").cloned().unwrap_or_else(|| json!({})))
            .unwrap();
    let mut set = planned.environment_set.clone();
    set.retain(|name, _| !["MASTER_ADDR", "MASTER_PORT", JOB_TOKEN_VARIABLE].contains(&name.as_str()));
    let collapsed = |variables: &Environment| -> std::collections::BTreeMap<String, String> {
        variables.iter().map(|(name, value)| (name.clone(), collapse(value))).collect()
    };
    assert_eq!(collapsed(&set), collapsed(&added), "{case}");
    let removed = case["expect"].get("env_removed").cloned().unwrap_or_else(|| json!([]));
    assert_eq!(json!(planned.environment_removed), removed, "{case}");
}

/// A word for a remote shell as that shell will see it.
fn without_quotes(word: &str) -> String {
    if word.starts_with("export ") || word.starts_with("cd ") {
        return word.replace(['"', '\\'], "");
    }
    match shell::split(word).as_deref() {
        Ok([bare]) if word.starts_with('"') && word.ends_with('"') => bare.clone(),
        _ => word.to_owned(),
    }
}

/// OURS 3 and 4: `-n` counts active slots, hosts are named as srun names them, the interpreter is honoured.
fn adjust_slurm(args: &LaunchArgs, options: &LaunchOptions, expected: &mut Vec<String>, found: &[String]) {
    expected[2] = found[2].clone();
    for word in expected.iter_mut() {
        if *word == args.include || *word == args.exclude {
            *word = word.replace('@', ",");
        } else if word == "--include" {
            *word = "--nodelist".to_owned();
        }
    }
    let python = expected.iter().position(|word| word == "PYTHON").expect("srun starts Python");
    let interpreter = options.interpreter.prefix("PYTHON");
    expected.splice(python..python + 2, interpreter);
}

#[test]
fn golden_node_launch() {
    golden().each_case("launcher/node_launch.json", 11, |case| {
        let world = serde_json::from_value(case["world_info"].clone()).expect("a world");
        let words = [
            "ferrospeed".to_owned(),
            "node-launch".to_owned(),
            format!("--world_info={}", world_info::encode(&world)),
        ];
        let parsed = Cli::try_parse_from(words.into_iter().chain(argv_of(case)));
        let args: NodeLaunchArgs = match parsed.unwrap_or_else(|error| panic!("{case}: {error}")).command {
            Command::NodeLaunch(args) => *args,
            other => panic!("parsed as {other:?}"),
        };
        let machine = Machine {
            environment: serde_json::from_value(case["env"].clone()).expect("env is a map of text"),
            python: "PYTHON".to_owned(),
            job_token: "TOKEN".to_owned(),
            topology: Topology { cores: vec![0], numa_cores: vec![vec![0]] },
            restart_count: 0,
        };
        let specs = args.to_node_launch().and_then(|node| Ok(node.rank_specs(&machine)?));
        if case.get("error").is_some() {
            assert!(specs.is_err(), "{case}");
            return;
        }
        if case["expect"] == json!([]) {
            // A node without a slot starts nothing; we say so.
            assert!(specs.is_err(), "{case}");
            return;
        }
        let specs = specs.unwrap_or_else(|error| panic!("{case}: {error}"));
        let recorded = case["expect"].as_array().expect("ranks");
        assert_eq!(specs.len(), recorded.len(), "{case}");
        for (position, (spec, recorded)) in specs.into_iter().zip(recorded).enumerate() {
            let mut expected = recorded.clone();
            // OURS 0
            let theirs = format!("--local_rank={}", expected["env"]["LOCAL_RANK"].as_str().unwrap());
            expected["env"]["LOCAL_RANK"] = json!(position.to_string());
            for word in expected["cmd"].as_array_mut().unwrap() {
                if *word == json!(theirs) {
                    *word = json!(format!("--local_rank={position}"));
                    break;
                }
            }
            let mut environment = spec.environment;
            assert_eq!(environment.shift_remove(JOB_TOKEN_VARIABLE).as_deref(), Some("TOKEN"));
            assert!(environment.shift_remove(FOLLOWER_VARIABLE).is_some());
            assert_eq!(environment.shift_remove("LOCAL_WORLD_SIZE"), environment.get("LOCAL_SIZE").cloned());
            assert_eq!(json!({"cmd": spec.command, "env": environment}), expected, "{case}");
        }
    });
}
