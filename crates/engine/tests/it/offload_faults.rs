//! Disks with offloaded state that fail, fill up, go away, or belong to a run that is killed; and memory that is short.

use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::common::disk::{COMBINATIONS, configuration, offloaded, start, state, steps, train};
use super::common::{Batch, Model, config, on_ranks};
use ferrospeed_engine::{Engine, EngineError, LoadOptions, Options, SaveOptions, Setup, initialize_model};
use ferrospeed_tensor::Tensor;
use ferrospeed_testkit::child;
use serde_json::{Value, json};

/// What a test's other process is to do: the folder it works in.
const CHILD: &str = "FERROSPEED_TEST_OFFLOAD_CHILD";

fn child_folder() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

/// This test in a process of its own, which finds `folder` where [`child_folder`] looks.
fn child(test: &str, folder: &Path) -> Command {
    let mut command = child::alone(module_path!(), test);
    // Threads have memory of their own, and machines have many.
    let threads = ("FERROSPEED_THREADS", "2");
    command.env(CHILD, folder).env(threads.0, threads.1);
    command
}

/// Runs a process to its end, which must come within two minutes.
fn run(command: &mut Command) -> std::io::Result<Output> {
    // A panic where memory is short has none for its backtrace.
    command.env("RUST_BACKTRACE", "0").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            let output = child.wait_with_output()?;
            panic!("it has not ended: {}", text(&output));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output()
}

fn text(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    format!("{:?}: {}", output.status, String::from_utf8_lossy(&text))
}

/// Gives every file without a name that this process has in a folder another length; what it had.
fn set_lengths(folder: &Path, length: u64) -> Vec<u64> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        if std::fs::read_link(&path).is_ok_and(|target| target.starts_with(folder) && target != folder) {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            found.push(file.metadata().unwrap().len());
            file.set_len(length).unwrap();
        }
    }
    found
}

/// A step that is expected to fail, itself or where the next forward reads what it updates; and how it does.
fn failed_step(engine: &mut Engine, model: &Model) -> String {
    let ids = || Batch::Tokens(Tensor::from_slice(&[1i64; 14], [2, 7], engine.device()).unwrap());
    let (first, second) = (ids(), ids());
    let mut step = || -> Result<(), EngineError> {
        let loss = engine.forward(|_| model.loss(&first))?;
        engine.backward(&loss)?;
        engine.step()?;
        engine.forward(|_| model.loss(&second))?;
        Ok(())
    };
    step().unwrap_err().to_string()
}

#[test]
fn a_disk_that_fails_names_its_tier_stops_training_and_leaves_the_checkpoint() {
    for sections in COMBINATIONS {
        let folder = tempfile::tempdir().unwrap();
        let (swap, saved) = (folder.path().join("swap"), folder.path().join("saved"));
        let away = offloaded(configuration("bf16", 1, "AdamW"), sections, &swap);
        let straight = train(1, away.clone()).remove(0);
        let expected = sections[sections.len() - 1];
        let found = on_ranks(1, move |world| {
            let (mut engine, model, parameters) = start(world, &away);
            let mut seen = steps(&mut engine, &model, 0, 2);
            engine.save_checkpoint(&saved, &SaveOptions::default()).unwrap();
            let length = set_lengths(&swap, 0).into_iter().max().unwrap();
            let error = failed_step(&mut engine, &model);
            for word in [expected, "nvme", swap.to_str().unwrap()] {
                assert!(error.contains(word), "{sections:?}: {error}");
            }
            // A disk that works again changes nothing: the state is lost until it is loaded.
            set_lengths(&swap, length);
            if sections == ["offload_optimizer"] {
                let again = failed_step(&mut engine, &model);
                assert!(again.contains("part old and part new"), "{again}");
                let refused = engine.save_checkpoint(&saved, &SaveOptions::default()).unwrap_err();
                assert!(refused.to_string().contains("part old and part new"), "{refused}");
            }
            engine.load_checkpoint(&saved, &LoadOptions::default()).unwrap();
            seen.extend(steps(&mut engine, &model, 2, 3));
            (seen, state(&engine, &parameters))
        });
        assert_eq!(found[0], straight, "{sections:?}");
    }
}

/// Turns over a bit at a part of the way through every file without a name that this process has in a folder.
fn flip_bits(folder: &Path, part: f64) {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        if std::fs::read_link(&path).is_ok_and(|target| target.starts_with(folder) && target != folder) {
            let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
            let at = (file.metadata().unwrap().len() as f64 * part) as u64;
            let mut byte = [0u8];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
        }
    }
}

/// A bit turned over in state that lies on a disk: either it is never read again, or the run ends and says so.
#[test]
fn a_bit_turned_over_on_the_disk_never_becomes_part_of_the_model() {
    for sections in COMBINATIONS {
        let folder = tempfile::tempdir().unwrap();
        let swap = folder.path().join("swap");
        let away = offloaded(configuration("bf16", 1, "AdamW"), sections, &swap);
        let straight = train(1, away.clone()).remove(0);
        let mut noticed = 0;
        for part in 0..10 {
            let (away, swap) = (away.clone(), swap.clone());
            let ended = on_ranks(1, move |world| {
                let (mut engine, model, parameters) = start(world, &away);
                let mut seen = steps(&mut engine, &model, 0, 2);
                flip_bits(&swap, f64::from(part) / 10.0 + 0.003);
                let rest = std::panic::AssertUnwindSafe(|| {
                    seen.extend(steps(&mut engine, &model, 2, 3));
                    (seen, state(&engine, &parameters))
                });
                std::panic::catch_unwind(rest).map_err(|why| why.downcast_ref::<String>().cloned())
            });
            match &ended[0] {
                Ok(found) => assert!(*found == straight, "{sections:?}, {part}: another result"),
                Err(why) => {
                    let why = why.as_ref().unwrap();
                    assert!(why.contains("Damaged"), "{sections:?}: {why}");
                    noticed += 1;
                }
            }
        }
        assert!(noticed >= 5, "{sections:?}: {noticed} of 10 were noticed");
    }
}

#[test]
fn a_rank_whose_disk_fails_keeps_nobody_waiting() {
    let folder = tempfile::tempdir().unwrap();
    // Ranks have one configuration: each finds its own folder where it stands.
    let away = offloaded(configuration("bf16", 1, "AdamW"), COMBINATIONS[2], Path::new("."));
    let base = folder.path().to_path_buf();
    let errors = on_ranks(2, move |world| {
        let (rank, own) = (world.rank(), base.join(world.rank().to_string()));
        std::fs::create_dir(&own).unwrap();
        // SAFETY: from here on this thread has a working directory of its own.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_FS) }, 0);
        std::env::set_current_dir(&own).unwrap();
        let (mut engine, model, _) = start(world, &away);
        steps(&mut engine, &model, 0, 1);
        if rank == 1 {
            set_lengths(&own, 0);
        }
        failed_step(&mut engine, &model)
    });
    assert!(errors[1].contains("nvme"), "{}", errors[1]);
    assert!(errors[0].contains("rank 1"), "{}", errors[0]);
}

#[test]
fn a_folder_that_is_removed_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let swap = folder.path().join("swap");
    let away = offloaded(configuration("bf16", 1, "AdamW"), COMBINATIONS[2], &swap);
    let straight = train(2, away.clone());
    let found = on_ranks(2, move |world| {
        let (mut engine, model, parameters) = start(world, &away);
        let mut seen = steps(&mut engine, &model, 0, 1);
        let _ = std::fs::remove_dir_all(&swap);
        seen.extend(steps(&mut engine, &model, 1, 3));
        (seen, state(&engine, &parameters))
    });
    assert_eq!(found, straight);
}

#[test]
fn a_run_killed_while_a_tile_is_written_leaves_nothing_and_its_checkpoint_loads() {
    const NAME: &str = "a_run_killed_while_a_tile_is_written_leaves_nothing_and_its_checkpoint_loads";
    let away =
        |folder: &Path| offloaded(configuration("bf16", 1, "AdamW"), COMBINATIONS[2], &folder.join("swap"));
    if let Some(folder) = child_folder() {
        on_ranks(1, move |world| {
            let (mut engine, model, _) = start(world, &away(&folder));
            steps(&mut engine, &model, 0, 2);
            engine.save_checkpoint(folder.join("saved"), &SaveOptions::default()).unwrap();
            let store = Arc::clone(engine.store());
            let before = store.disk_traffic().written;
            // Counted when a write begins: the first of the step's many tiles is under way.
            std::thread::spawn(move || {
                while store.disk_traffic().written == before {
                    std::hint::spin_loop();
                }
                // SAFETY: ends this process, and nothing after it runs.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            });
            steps(&mut engine, &model, 2, 1000);
        });
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = run(&mut child(NAME, folder.path())).unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{}", text(&output));
    assert_eq!(std::fs::read_dir(folder.path().join("swap")).unwrap().count(), 0, "swap files stayed");
    let (value, saved) = (away(folder.path()), folder.path().join("saved"));
    let straight = train(1, value.clone()).remove(0);
    let found = on_ranks(1, move |world| {
        let (mut engine, model, parameters) = start(world, &value);
        engine.load_checkpoint(&saved, &LoadOptions::default()).unwrap();
        (steps(&mut engine, &model, 2, 3), state(&engine, &parameters))
    });
    let last = straight.0.len() - found[0].0.len();
    assert_eq!((&found[0].0[..], &found[0].1), (&straight.0[last..], &straight.1));
}

#[test]
fn a_full_disk_is_named_before_training() {
    const NAME: &str = "a_full_disk_is_named_before_training";
    if let Some(folder) = child_folder() {
        let value = offloaded(configuration("bf16", 1, "AdamW"), COMBINATIONS[0], &folder);
        on_ranks(1, move |world| {
            let (_, parameters) =
                Model::build(&json!({"kind": "lm", "vocab": 29, "dm": 64, "nh": 2, "nl": 2, "tmax": 7}));
            let setup = Setup::new(config(&value, 1), world, ferrospeed_cpu::with_threads(1));
            let refused =
                initialize_model(&setup, &parameters, Options::default()).err().unwrap().to_string();
            println!("refused: {refused}");
        });
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mount = "mount -t tmpfs -o size=256k tmpfs \"$0\" && exec \"$@\"";
    let inner = child(NAME, folder.path());
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-ec", mount]).arg(folder.path()).arg(inner.get_program());
    let output = run(command.args(inner.get_args()).env(CHILD, folder.path()));
    let Ok(output) = output else {
        return ferrospeed_testkit::skip::skip("there is no `unshare` here");
    };
    let said = text(&output);
    if said.contains("unshare failed") || said.contains("mount:") {
        return ferrospeed_testkit::skip::skip(
            "an ordinary process may not mount a tmpfs here (unshare -rm)",
        );
    }
    for word in ["refused: ", "offload_optimizer", "nvme", "bytes free", folder.path().to_str().unwrap()] {
        assert!(said.contains(word), "{word} is missing: {said}");
    }
}

/// 18.9 million weights: 302 MB of weights, gradients, f32 weights and moments.
fn large() -> Value {
    json!({"kind": "lm", "vocab": 64, "dm": 512, "nh": 8, "nl": 6, "tmax": 7})
}

const MODEL_STATE_BYTES: u64 = 18_900_000 * 16;
/// Less than half of it.
const LIMIT_BYTES: u64 = 136 << 20;

/// The large model in tiles of a quarter of a million elements, on a disk where there is a folder.
fn large_configuration(folder: &Path) -> Value {
    let mut value = configuration("bf16", 1, "AdamW");
    let zero = &mut value["zero_optimization"];
    zero["sub_group_size"] = json!(262_144);
    zero["stage3_prefetch_bucket_size"] = json!(1_000_000);
    zero["stage3_max_live_parameters"] = json!(4_000_000);
    zero["stage3_max_reuse_distance"] = json!(0);
    if folder.as_os_str().is_empty() { value } else { offloaded(value, COMBINATIONS[2], folder) }
}

/// The most bytes that were ever counted, and that were ever resident.
fn peaks(engine: &Engine) -> [u64; 2] {
    let counted =
        [engine.device(), &ferrospeed_cpu::device()].map(|device| device.memory_usage().peak_total() as u64);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let resident: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    [counted.iter().sum(), resident << 10]
}

#[test]
fn a_checkpoint_of_offloaded_state_passes_through_memory_in_pieces() {
    const NAME: &str = "a_checkpoint_of_offloaded_state_passes_through_memory_in_pieces";
    let Some(folder) = child_folder() else {
        let folder = tempfile::tempdir().unwrap();
        let output = run(&mut child(NAME, folder.path())).unwrap();
        assert!(output.status.success(), "{}", text(&output));
        return;
    };
    on_ranks(1, move |world| {
        let (model, parameters) = Model::build(&large());
        let config = config(&large_configuration(&folder.join("swap")), 1);
        let setup = Setup::new(config, world, ferrospeed_cpu::with_threads(1));
        let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
        steps(&mut engine, &model, 0, 1);
        let before = peaks(&engine);
        let saved = folder.join("saved");
        engine.save_checkpoint(&saved, &SaveOptions::default()).unwrap();
        engine.load_checkpoint(&saved, &LoadOptions::default()).unwrap();
        let grown: Vec<u64> =
            peaks(&engine).iter().zip(before).map(|(after, before)| after - before).collect();
        // 227 MB went to the checkpoint and came back.
        assert!(grown.iter().all(|&bytes| bytes < MODEL_STATE_BYTES / 6), "{grown:?} more than {before:?}");
    });
}

#[test]
fn a_model_whose_states_do_not_fit_trains_within_a_limit_of_memory() {
    const NAME: &str = "a_model_whose_states_do_not_fit_trains_within_a_limit_of_memory";
    if let Some(folder) = child_folder() {
        let value = large_configuration(&folder);
        on_ranks(1, move |world| {
            let (model, parameters) = Model::build(&large());
            assert!(parameters.numel() as u64 * 16 > MODEL_STATE_BYTES);
            let setup = Setup::new(config(&value, 1), world, ferrospeed_cpu::with_threads(1));
            let mut engine = match initialize_model(&setup, &parameters, Options::default()) {
                Ok(engine) => engine,
                Err(error) => return println!("refused: {error}"),
            };
            steps(&mut engine, &model, 0, 2);
            let [counted, resident] = peaks(&engine);
            println!("counted: {counted}");
            println!("resident: {resident}");
        });
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let limited = |folder: &Path| {
        let mut command = child(NAME, folder);
        // SAFETY: between fork and exec only `setrlimit` is called, which is safe there.
        unsafe {
            command.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: LIMIT_BYTES, rlim_max: LIMIT_BYTES };
                match libc::setrlimit(libc::RLIMIT_DATA, &limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            })
        };
        run(&mut command).unwrap()
    };
    let within = limited(folder.path());
    let said = text(&within);
    let number = |key: &str| -> u64 {
        let value = said.split(key).nth(1).and_then(|rest| rest.split_whitespace().next());
        value.unwrap_or_else(|| panic!("no {key} in {said}")).parse().unwrap()
    };
    assert!(within.status.success(), "{said}");
    let (counted, resident) = (number("counted: "), number("resident: "));
    assert!(counted < LIMIT_BYTES && resident < LIMIT_BYTES, "{counted} counted, {resident} resident");
    // The limit means something: without a disk it is not enough.
    let without = text(&limited(Path::new("")));
    assert!(without.contains("refused: ") || !without.contains("counted: "), "{without}");
}
