//! What a training engine says of itself when its configuration asks.

use std::sync::{Arc, Mutex};

use super::common::{config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_nn::{Init, Linear};
use ferrospeed_tensor::{DType, Tensor, ops};
use ferrospeed_testkit::child;
use serde_json::{Value, json};

const ROWS: usize = 4;

fn configuration(more: Value) -> Value {
    let mut value = json!({
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    });
    value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    value
}

fn start(world: World, value: &Value) -> ferrospeed_engine::Result<(Engine, Linear)> {
    let init = Init::root();
    let layer = Linear::new(&init.at("layer"), 16, 8, true);
    let setup = Setup::new(config(value, world.size()), world, device(1));
    Ok((initialize_model(&setup, &init.parameters(), Options::default())?, layer))
}

/// A whole step.
fn step(engine: &mut Engine, layer: &Linear) {
    let x = Tensor::full([ROWS, 16], 0.5, DType::F32, engine.device()).unwrap();
    for _ in 0..engine.gradient_accumulation_steps() {
        let loss = engine
            .forward(|_| {
                let x = ops::cast(&x, layer.weight().dtype())?;
                ops::mean(&ops::square(&layer.forward(&x)?)?)
            })
            .unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
}

fn count_of(table: &str, operation: &str) -> u64 {
    let rows = table.lines().skip_while(|line| *line != operation).skip(1);
    let rows = rows.take_while(|line| line.starts_with(' '));
    rows.map(|row| row[40..60].trim().parse::<u64>().unwrap()).sum()
}

#[test]
fn communication_is_counted_and_summed_up_when_the_configuration_asks() {
    on_ranks(2, |world| {
        let value = configuration(json!({
            "zero_optimization": {"stage": 1}, "comms_logger": {"enabled": true},
        }));
        let (mut engine, layer) = start(world, &value).unwrap();
        step(&mut engine, &layer);
        let before = engine.communication_summary(false).unwrap();
        for _ in 0..3 {
            step(&mut engine, &layer);
        }
        let after = engine.communication_summary(true).unwrap();
        // Stage 1 gathers the new weights once a step.
        assert_eq!(count_of(&after, "all_gather") - count_of(&before, "all_gather"), 3, "{before}{after}");
        assert!(after.contains("Breakdown with straggler effect"), "{after}");
        assert!(!before.contains("straggler"), "{before}");
    });
}

#[test]
fn only_the_named_operations_are_counted_and_none_without_the_section() {
    on_ranks(2, |world| {
        let section = json!({"enabled": true, "prof_all": false, "prof_ops": ["all_gather_into_tensor"]});
        let value = configuration(json!({"zero_optimization": {"stage": 1}, "comms_logger": section}));
        let (mut engine, layer) = start(world, &value).unwrap();
        step(&mut engine, &layer);
        let table = engine.communication_summary(false).unwrap();
        assert!(count_of(&table, "all_gather") > 0 && count_of(&table, "all_reduce") == 0, "{table}");
    });
    on_ranks(1, |world| {
        let (mut engine, layer) = start(world, &configuration(json!({}))).unwrap();
        step(&mut engine, &layer);
        assert_eq!(engine.communication_summary(false).unwrap().lines().count(), 1);
    });
}

#[test]
fn an_operation_that_is_none_is_refused_with_those_there_are() {
    let section = json!({"enabled": true, "prof_all": false, "prof_ops": ["allreduce"]});
    let error = start(World::solo(), &configuration(json!({"comms_logger": section}))).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("comms_logger.prof_ops") && text.contains("all_reduce"), "{text}");
}

#[test]
fn a_place_where_no_curve_can_be_written_is_told_by_its_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for section in ["tensorboard", "csv_monitor"] {
        let monitor = json!({"enabled": true, "output_path": file.path(), "job_name": "job"});
        let error = start(World::solo(), &configuration(json!({section: monitor}))).err().unwrap();
        assert!(error.to_string().starts_with(&format!("{section}.output_path: ")), "{error}");
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("taken"), "").unwrap();
        let monitor = json!({"enabled": true, "output_path": place.path(), "job_name": "taken"});
        let error = start(World::solo(), &configuration(json!({section: monitor}))).err().unwrap();
        assert!(error.to_string().starts_with(&format!("{section}.job_name: ")), "{error}");
    }
}

/// What is logged while `work` runs on this thread.
fn logged(work: impl FnOnce()) -> String {
    let text = Arc::new(Mutex::new(Vec::new()));
    let writer = text.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .without_time()
        .with_writer(move || Log(writer.clone()))
        .finish();
    // While there is one reader only, lines that another test meets first ask that test's thread, which has none.
    let _second_reader = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    tracing::subscriber::with_default(subscriber, || {
        // Other tests may have met these lines before there was anybody to read them.
        tracing::callsite::rebuild_interest_cache();
        work();
    });
    let text = text.lock().unwrap();
    String::from_utf8(text.clone()).unwrap()
}

struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn rows_of(folder: &std::path::Path, tag: &str) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(folder.join("job").join(format!("{tag}.csv"))).unwrap();
    let row = |line: &str| {
        let (x, y) = line.split_once(',').unwrap();
        (x.parse().unwrap(), y.parse().unwrap())
    };
    text.lines().skip(1).map(row).collect()
}

#[test]
fn a_program_of_ones_own_gets_the_monitors_of_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_owned();
    on_ranks(2, move |world| {
        let output = place.to_str().unwrap();
        let value = configuration(json!({
            "gradient_accumulation_steps": 2,
            "wall_clock_breakdown": true,
            "fp16": {"enabled": true, "loss_scale": 8},
            "csv_monitor": {"enabled": true, "output_path": output, "job_name": "job"},
            "tensorboard": {"enabled": true, "output_path": output, "job_name": "board"},
            "wandb": {"enabled": true, "dir": format!("{output}/wandb")},
        }));
        let (mut engine, layer) = start(world, &value).unwrap();
        for _ in 0..2 {
            step(&mut engine, &layer);
        }
        engine.monitor("Mine/of_my_own", 7.0);
    });
    // Two ranks, two micro-batches of four rows.
    let losses = rows_of(folder.path(), "Train_Samples_train_loss");
    assert_eq!(losses.iter().map(|(x, _)| *x).collect::<Vec<_>>(), [0, 16]);
    assert_eq!(rows_of(folder.path(), "Train_Samples_lr"), [(16, 0.01), (32, 0.01)]);
    assert_eq!(rows_of(folder.path(), "Train_Samples_loss_scale"), [(16, 8.0), (32, 8.0)]);
    for timer in ["forward", "backward", "backward_inner", "backward_allreduce", "step"] {
        let rows = rows_of(folder.path(), &format!("Train_Samples_elapsed_time_ms_{timer}"));
        assert_eq!(rows.len(), 2, "{timer}");
    }
    assert_eq!(rows_of(folder.path(), "Mine_of_my_own"), [(32, 7.0)]);
    let files = |name: &str| std::fs::read_dir(folder.path().join(name)).unwrap().count();
    // Rank 0 alone writes.
    assert_eq!((files("board"), files("wandb")), (1, 1));
}

#[test]
fn the_loss_of_a_step_is_the_mean_over_ranks_and_micro_batches() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_owned();
    on_ranks(2, move |world| {
        let csv = json!({"enabled": true, "output_path": place, "job_name": "job"});
        let value = configuration(json!({"gradient_accumulation_steps": 2, "csv_monitor": csv}));
        let rank = world.rank() as f32;
        let (mut engine, layer) = start(world, &value).unwrap();
        let x = Tensor::zeros([1, 16], DType::F32, engine.device()).unwrap();
        for micro in 0..2 {
            let shift = 10.0 * rank + micro as f32;
            let loss = engine.forward(|_| ops::mean(&ops::affine(&layer.forward(&x)?, 0.0, shift)?)).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
    });
    assert_eq!(rows_of(folder.path(), "Train_Samples_train_loss"), [(0, 5.5)]);
}

#[test]
fn timers_are_logged_for_each_micro_batch_and_for_each_step() {
    let text = logged(|| {
        let value = configuration(json!({"gradient_accumulation_steps": 2, "wall_clock_breakdown": true}));
        let (mut engine, layer) = start(World::solo(), &value).unwrap();
        step(&mut engine, &layer);
        let times = engine.last_step_times();
        assert!(times.backward >= times.backward_inner + times.backward_allreduce, "{times:?}");
        assert!(!times.backward_inner.is_zero());
    });
    let names = ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"];
    let is_line = |line: &str, suffix: &str| {
        line.contains("time (ms) | ")
            && names.iter().all(|name| line.contains(&format!("| {name}{suffix}: ")))
    };
    assert_eq!(text.lines().filter(|line| is_line(line, "_microstep")).count(), 2, "{text}");
    assert_eq!(text.lines().filter(|line| is_line(line, "")).count(), 1, "{text}");
}

#[test]
fn progress_and_throughput_are_logged_as_deepspeed_does() {
    let text = logged(|| {
        let (mut engine, layer) =
            start(World::solo(), &configuration(json!({"steps_per_print": 2}))).unwrap();
        for _ in 0..5 {
            step(&mut engine, &layer);
        }
    });
    for step in [2, 4] {
        let line = format!("step={step}, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]");
        assert!(text.contains(&line), "{text}");
    }
    // The first two steps are a warm-up.
    assert!(!text.contains("global_step=2"), "{text}");
    let line = text.lines().find(|line| line.contains("epoch=0/micro_step=4/global_step=4, ")).expect(&text);
    for part in ["RunningAvgSamplesPerSec=", "CurrSamplesPerSec=", "MemAllocated=", "MaxMemAllocated="] {
        assert!(line.contains(part), "{line}");
    }
    assert!(!text.contains("time (ms)"), "{text}");
}

#[test]
fn state_and_memory_are_logged_when_asked_for_and_only_then() {
    let of = |more: Value| {
        logged(|| {
            let (mut engine, layer) = start(World::solo(), &configuration(more)).unwrap();
            step(&mut engine, &layer);
        })
    };
    let text = of(json!({"dump_state": true, "memory_breakdown": true}));
    assert!(text.contains("\n  zero_stage ................... 0\n"), "{text}");
    assert!(text.contains("\n  parameters ................... 136\n"), "{text}");
    assert!(text.contains("\n  json = {\n    \""), "{text}");
    for when in
        ["before forward", "after forward", "before backward", "after backward", "before step", "after step"]
    {
        assert_eq!(
            text.matches(&format!(
                "Engine {when}\nMA 0.0 GB         Max_MA 0.0 GB         CA 0.0 GB         Max_CA 0 GB \n"
            ))
            .count(),
            1,
            "{text}"
        );
    }
    let line = text.lines().find(|line| line.contains("(now/peak)")).unwrap();
    for category in ["parameters", "gradients", "optimizer", "activations", "buffers", "total", "process"] {
        assert!(line.contains(category), "{line}");
    }
    let text = of(json!({}));
    assert!(!text.contains("zero_stage") && !text.contains("Engine before"), "{text}");
}

/// Says what a configuration asks for, in a process that keeps no log.
#[test]
fn what_a_configuration_asks_for_is_printed_where_the_program_keeps_no_log_and_can_be_turned_off() {
    const PRINTS: &str = "FERROSPEED_TEST_PRINTS";
    let this =
        "what_a_configuration_asks_for_is_printed_where_the_program_keeps_no_log_and_can_be_turned_off";
    if let Ok(prints) = std::env::var(PRINTS) {
        ferrospeed_comm::print_what_was_asked_for(prints == "yes");
        let profiler = json!({"enabled": true, "profile_step": 0});
        let more = json!({"dump_state": true, "wall_clock_breakdown": true, "flops_profiler": profiler});
        let (mut engine, layer) = start(World::solo(), &configuration(more)).unwrap();
        step(&mut engine, &layer);
        return;
    }
    let said = |prints: &str| {
        let output = child::alone(module_path!(), this).env(PRINTS, prints).output().unwrap();
        child::assert_passed(&output);
        String::from_utf8(output.stdout).unwrap()
    };
    let (said, silent) = (said("yes"), said("no"));
    for part in
        ["zero_stage ................... 0", "time (ms) | fwd_microstep:", "Profile Summary at step 0"]
    {
        assert!(said.contains(part), "{said}");
        assert!(!silent.contains(part), "{silent}");
    }
}
