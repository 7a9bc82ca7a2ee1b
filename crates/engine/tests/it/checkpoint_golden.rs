//! Checkpoints that DeepSpeed wrote, loaded into running jobs: the runs go on as DeepSpeed's did.

use super::common;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::common::{Batch, Model, engine, meaningful, on_ranks};
use ferrospeed_checkpoint::deepspeed::{import_deepspeed, import_universal};
use ferrospeed_checkpoint::pt::Unknown;
use ferrospeed_checkpoint::{Checkpoint, Disk, Retention, Target};
use ferrospeed_engine::{LoadOptions, SaveOptions, StepReport};
use ferrospeed_nn::{Init, Linear, Parameters};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::{Device, Tensor};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::{golden, read_json};
use ferrospeed_testkit::movement::Movement;
use ferrospeed_testkit::tensors::{self, Recorded};
use ferrospeed_zero::ParamGroup;
use ferrospeed_zero::access::Which;
use serde_json::Value;

/// The models of the recordings: those of the trajectories, and one whose two layers share a weight.
enum Recorder {
    Plain(Model),
    Tied(Linear),
}

impl Recorder {
    fn build(description: &Value) -> (Recorder, Parameters) {
        if description["kind"] != "tied" {
            let (model, parameters) = Model::build(description);
            return (Recorder::Plain(model), parameters);
        }
        let init = Init::root();
        let size = description["d"].as_u64().unwrap() as usize;
        let layer = Linear::new(&init.at("a"), size, size, true);
        (Recorder::Tied(layer), init.parameters())
    }

    fn loss(&self, batch: &Batch) -> ferrospeed_tensor::Result<Tensor> {
        match (self, batch) {
            (Recorder::Plain(model), batch) => model.loss(batch),
            (Recorder::Tied(a), Batch::Regression { x, y }) => {
                let hidden = ops::tanh(&a.forward(x)?)?;
                let out = ops::linear(&hidden, a.weight(), None, WeightLayout::OutIn)?;
                ops::mean(&ops::square(&ops::sub(&out, y)?)?)
            }
            (Recorder::Tied(_), Batch::Tokens(_)) => panic!("the batch is for another model"),
        }
    }
}

/// A job to be resumed from a checkpoint.
#[derive(Clone)]
struct Job {
    name: String,
    model: Value,
    config: Value,
    groups: Value,
    ranks: usize,
    tensors: BTreeMap<String, Recorded>,
    steps: std::ops::Range<usize>,
}

/// What one rank saw.
struct Seen {
    missing: Vec<String>,
    aliases: BTreeMap<String, String>,
    /// The weights right after the load, as an operation reads them.
    loaded: BTreeMap<String, Vec<f32>>,
    losses: Vec<f32>,
    lr: Vec<f64>,
    global_steps: u64,
    values: BTreeMap<String, Vec<f32>>,
}

impl Job {
    fn batch(&self, step: usize, rank: usize, device: &Device) -> Batch {
        let key = |what: &str| format!("batch.{step}.{rank}.{what}");
        let float = |what: &str| {
            let recorded = &self.tensors[&key(what)];
            Tensor::from_slice(recorded.floats(), &recorded.shape, device).unwrap()
        };
        match self.tensors.get(&key("ids")) {
            Some(ids) => Batch::Tokens(Tensor::from_slice(ids.integers(), &ids.shape, device).unwrap()),
            None => Batch::Regression { x: float("x"), y: float("y") },
        }
    }

    fn groups(&self, parameters: &Parameters) -> Option<Vec<ParamGroup>> {
        let config = common::config(&self.config, self.ranks);
        let (_, base) = Optimizer::from_config(config.optimizer.as_ref().unwrap()).unwrap();
        let group = |group: &Value| {
            let suffixes: Vec<&str> =
                group["suffix"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
            let (params, _) =
                parameters.partition(|param| suffixes.iter().any(|suffix| param.name().ends_with(suffix)));
            let number = |key: &str, default: f64| group["opts"][key].as_f64().unwrap_or(default);
            let (lr, weight_decay) = (number("lr", base.lr), number("weight_decay", base.weight_decay));
            ParamGroup {
                params: params.as_slice().to_vec(),
                options: GroupOptions { lr, weight_decay, ..base },
            }
        };
        Some(self.groups.as_array()?.iter().map(group).collect())
    }

    /// Loads a checkpoint and goes on; with `save`, writes one of our own there before the last step.
    fn resume(self: &Arc<Job>, dir: &Path, save: Option<&Path>) -> Vec<Seen> {
        let (job, dir, save) = (self.clone(), dir.to_path_buf(), save.map(Path::to_path_buf));
        on_ranks(self.ranks, move |world| {
            let rank = world.rank();
            let (model, parameters) = Recorder::build(&job.model);
            let mut engine = engine(world, &job.config, &parameters, job.groups(&parameters), None, 1);
            let options = LoadOptions { load_module_strict: false, ..Default::default() };
            let loaded = engine
                .load_checkpoint(&dir, &options)
                .unwrap_or_else(|error| panic!("{}: {error}", job.name));
            let weights = |engine: &ferrospeed_engine::Engine| -> BTreeMap<String, Vec<f32>> {
                let full = |param| engine.store().full_as_read(param).unwrap();
                parameters.as_slice().iter().map(|param| (param.name().to_owned(), full(param))).collect()
            };
            let device = engine.device().clone();
            let mut seen = Seen {
                missing: loaded.missing,
                aliases: Checkpoint::open_any(&loaded.path).unwrap().manifest().aliases.clone(),
                loaded: weights(&engine),
                losses: Vec::new(),
                lr: Vec::new(),
                global_steps: 0,
                values: BTreeMap::new(),
            };
            for step in job.steps.clone() {
                if let Some(folder) = save.as_ref().filter(|_| step + 1 == job.steps.end) {
                    engine.save_checkpoint(folder, &SaveOptions::default()).unwrap();
                }
                let batch = job.batch(step, rank, &device);
                let loss = engine.forward(|_| model.loss(&batch)).unwrap();
                seen.losses.push(loss.item().unwrap());
                engine.backward(&loss).unwrap();
                assert!(matches!(engine.step().unwrap(), StepReport::Applied { .. }));
            }
            (seen.lr, seen.global_steps) = (engine.get_lr(), engine.global_steps());
            for param in parameters.as_slice() {
                let (store, name) = (engine.store(), param.name());
                seen.values.insert(format!("final.{name}"), store.full_as_read(param).unwrap());
                for state in ["exp_avg", "exp_avg_sq"] {
                    if let Ok(values) = store.full(param, Which::State(state)) {
                        seen.values.insert(format!("{state}.{name}"), values);
                    }
                }
            }
            seen
        })
    }
}

/// A checkpoint that is read where it lies is the one that an import makes of it.
fn assert_same_bits(name: &str, lying: &[Seen], imported: &[Seen]) {
    for (lying, imported) in lying.iter().zip(imported) {
        assert_eq!((&lying.missing, &lying.aliases), (&imported.missing, &imported.aliases), "{name}");
        assert_eq!((&lying.losses, &lying.lr), (&imported.losses, &imported.lr), "{name}");
        assert_eq!(lying.global_steps, imported.global_steps, "{name}");
        assert_eq!(lying.values.len(), imported.values.len(), "{name}");
        for (key, values) in lying.values.iter().chain(&lying.loaded) {
            let other = imported.values.get(key).or_else(|| imported.loaded.get(key));
            assert_eq!(other, Some(values), "{name}: {key}");
        }
    }
}

fn target(dir: &Path) -> Target<'_> {
    Target { dir, tag: "imported", update_latest: true, retention: Retention::default(), fs: &Disk }
}

/// A run that is stopped before its last step and resumed from our own checkpoint ends in the very bits of one that
/// never stopped, as DeepSpeed's recorded resumes do. `went_on` is the one that wrote the checkpoint and never stopped.
fn assert_stopping_changes_nothing(job: &Job, saved: &Path, went_on: &[Seen]) {
    let mut rest = job.clone();
    rest.steps = job.steps.end - 1..job.steps.end;
    rest.config["checkpoint"]["load_universal"] = false.into();
    for (resumed, went_on) in Arc::new(rest).resume(saved, None).iter().zip(went_on) {
        assert_eq!(resumed.losses.last(), went_on.losses.last(), "{}: the last loss", job.name);
        assert_eq!((&resumed.lr, resumed.global_steps), (&went_on.lr, went_on.global_steps), "{}", job.name);
        for (key, values) in &went_on.values {
            assert_eq!(resumed.values.get(key), Some(values), "{}: {key} after our own resume", job.name);
        }
    }
}

/// How far a resumed run may come out from the recorded one: in f32 another order of sums, in bf16 activations of 8 bits.
struct Tolerances {
    loss: f32,
    moved: f64,
    moment: f64,
    rounding: f32,
}

const F32: Tolerances = Tolerances { loss: 1e-5, moved: 1e-4, moment: 1e-4, rounding: 0.0 };
const BF16: Tolerances = Tolerances { loss: 1e-2, moved: 0.35, moment: 0.07, rounding: 1.0 / 256.0 };

/// Losses, rates, counters and final values against the recording.
fn compare(job: &Job, start: &str, ranks: &[Seen], recorded: [&Value; 3], tolerances: &Tolerances) {
    let [losses, lr, global_steps] = recorded;
    for (rank, seen) in ranks.iter().enumerate() {
        let what = |what: &str| format!("{}: {what}, rank {rank}", job.name);
        let mut compared = 0;
        let recorded = losses.as_array().unwrap().iter().map(|step| step[rank].as_f64().unwrap() as f32);
        assert_close(
            &what("losses"),
            &seen.losses,
            &recorded.collect::<Vec<_>>(),
            tolerances.loss,
            tolerances.loss,
        );
        let rates: Vec<f32> = seen.lr.iter().map(|rate| *rate as f32).collect();
        let recorded: Vec<f32> =
            lr.as_array().unwrap().iter().map(|rate| rate.as_f64().unwrap() as f32).collect();
        assert_close(&what("learning rates"), &rates, &recorded, 1e-9, 0.0);
        assert_eq!(Some(seen.global_steps), global_steps.as_u64(), "{}", what("steps"));
        for (key, recorded) in &job.tensors {
            // Everything that was recorded of the end is compared; an alias is the parameter that it names.
            let Some(kind) =
                ["final.", "exp_avg.", "exp_avg_sq."].iter().find(|kind| key.starts_with(**kind))
            else {
                continue;
            };
            let name = key.strip_prefix(kind).and_then(|name| seen.aliases.get(name));
            let own = name.map_or(key.clone(), |name| format!("{kind}{name}"));
            let actual = seen.values.get(&own).unwrap_or_else(|| panic!("{}", what(&format!("no {own}"))));
            compared += 1;
            let name = key.strip_prefix(kind).unwrap();
            let expected = meaningful(name, recorded.floats());
            let is_weight = *kind == "final.";
            let start = is_weight.then(|| meaningful(name, job.tensors[&format!("{start}.{name}")].floats()));
            let (tolerance, rounding) =
                if is_weight { (tolerances.moved, tolerances.rounding) } else { (tolerances.moment, 0.0) };
            let movement = Movement { start: start.as_deref(), expected: &expected, rounding };
            movement.assert(&what(key), &meaningful(name, actual), tolerance);
        }
        assert!(compared >= seen.loaded.len(), "{}: {compared} compared", what("final values"));
    }
}

#[test]
fn golden_deepspeed_checkpoints_resume_as_they_did() {
    golden().each_entry("checkpoint/runs", "", 17, |case| {
        let facts = read_json(&case.join("meta.json"));
        let size = |key: &str| facts[key].as_u64().unwrap() as usize;
        let (dir, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        import_deepspeed(&case.join("ckpt"), None, Unknown::Refuse, &target(dir.path())).unwrap();
        let saved = size("steps_before_save");
        let job = Arc::new(Job {
            name: facts["name"].as_str().unwrap().to_owned(),
            model: facts["model"].clone(),
            config: facts["ds_config"].clone(),
            groups: facts["param_groups"].clone(),
            ranks: size("world_size"),
            tensors: tensors::read(&case.join("run.safetensors")),
            steps: saved..saved + size("steps_after"),
        });
        let ranks = job.resume(&case.join("ckpt"), Some(own.path()));
        assert_same_bits(&job.name, &ranks, &job.resume(dir.path(), None));
        assert_stopping_changes_nothing(&job, own.path(), &ranks);
        let frozen = facts["model"]["freeze"].as_str();
        for name in &ranks[0].missing {
            assert!(frozen.is_some_and(|prefix| name.starts_with(prefix)), "{}: {name} is missing", job.name);
        }
        for (name, loaded) in ranks[0].loaded.iter().filter(|(name, _)| !ranks[0].missing.contains(name)) {
            let saved = job.tensors[&format!("saved.{name}")].floats();
            assert_eq!(loaded, saved, "{}: {name} as loaded", job.name);
        }
        // Where the file lacks the frozen weights, a fresh engine keeps its own and goes another way.
        if ranks[0].missing.is_empty() {
            for (name, resumed) in job
                .tensors
                .iter()
                .filter_map(|(key, value)| Some((key.strip_prefix("resumed_final.")?, value)))
            {
                assert_eq!(
                    resumed,
                    &job.tensors[&format!("final.{name}")],
                    "{}: {name} as recorded",
                    job.name
                );
            }
            let tolerances = if facts["dtype"] == "bf16" { BF16 } else { F32 };
            let recorded = ["losses_after_uninterrupted", "lr_after_resume", "global_steps_after_resume"];
            compare(&job, "saved", &ranks, recorded.map(|key| &facts[key]), &tolerances);
        }
    });
}

#[test]
fn golden_universal_checkpoints_load_on_other_ranks_and_stages() {
    golden().each_entry("checkpoint/universal_load", ".json", 3, |path| {
        let facts = read_json(path);
        let source = golden().root().join("checkpoint/runs").join(facts["source"].as_str().unwrap());
        let meta = read_json(&source.join("meta.json"));
        let folder = std::fs::read_to_string(source.join("uni/latest_universal")).unwrap();
        let (dir, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        import_universal(&source.join("uni").join(folder.trim()), Unknown::Refuse, &target(dir.path()))
            .unwrap();
        let job = Arc::new(Job {
            name: facts["name"].as_str().unwrap().to_owned(),
            model: meta["model"].clone(),
            config: facts["ds_config"].clone(),
            groups: meta["param_groups"].clone(),
            ranks: facts["target_world_size"].as_u64().unwrap() as usize,
            tensors: tensors::read(&path.with_extension("safetensors")),
            steps: 0..facts["losses"].as_array().unwrap().len(),
        });
        assert_eq!(job.config["checkpoint"]["load_universal"], true, "{}", job.name);
        let ranks = job.resume(&source.join("uni"), Some(own.path()));
        let mut imported = (*job).clone();
        imported.config["checkpoint"]["load_universal"] = false.into();
        assert_same_bits(&job.name, &ranks, &Arc::new(imported).resume(dir.path(), None));
        assert_stopping_changes_nothing(&job, own.path(), &ranks);
        for (name, loaded) in &ranks[0].loaded {
            // What is recorded as `master.` here is not that: it holds an optimizer state, while `loaded.` and the
            // steps that follow are those of the weights.
            let expected = job.tensors[&format!("loaded.{name}")].floats();
            assert_eq!(loaded, expected, "{}: {name} as loaded", job.name);
        }
        let halved = ["bf16", "fp16"].iter().any(|key| job.config[*key]["enabled"] == true);
        let recorded = ["losses", "lr", "global_steps"].map(|key| &facts[key]);
        compare(&job, "loaded", &ranks, recorded, if halved { &BF16 } else { &F32 });
    });
}
