//! Recorded DeepSpeed checkpoints: extracted, imported, and written again.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::common::files_below;
use super::common::rewrite::{as_the_trainer_writes, rewrite, with};
use ferrospeed_checkpoint::deepspeed::{
    ExportOptions, Fp32Weights, Spelling, export_deepspeed, export_universal, import_deepspeed,
    import_universal,
};
use ferrospeed_checkpoint::pt::{PtFile, Unknown, Value};
use ferrospeed_checkpoint::{Checkpoint, Disk, Dtype, Kind, Retention, Target};
use ferrospeed_testkit::golden::{golden, read_json};
use safetensors::SafeTensors;
use serde_json::Value as Json;

const RUNS: &str = "checkpoint/runs";

fn cases(group: &str) -> Vec<PathBuf> {
    golden().entries(group, "").into_iter().filter(|case| case.join("ckpt").is_dir()).collect()
}

/// A recorded extraction: names in order, shapes and bytes.
fn recorded(case: &Path) -> Option<Vec<(String, Vec<u64>, Vec<u8>)>> {
    let path = case.join("zero_to_fp32.safetensors");
    let bytes = path.is_file().then(|| std::fs::read(&path).unwrap())?;
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let order = read_json(&case.join("zero_to_fp32.order.json"));
    let names = order["order"].as_array().unwrap().iter().map(|name| name.as_str().unwrap());
    let tensor = |name: &str| {
        let view = file.tensor(name).unwrap();
        (name.to_owned(), view.shape().iter().map(|size| *size as u64).collect(), view.data().to_vec())
    };
    Some(names.map(tensor).collect())
}

fn extracted(dir: &Path) -> Result<Vec<(String, Vec<u64>, Vec<u8>)>, String> {
    let weights = Fp32Weights::open(dir, None, false, Unknown::Refuse).map_err(|error| error.to_string())?;
    let tensor = |tensor: &ferrospeed_checkpoint::deepspeed::Fp32Tensor| {
        Ok((
            tensor.name.clone(),
            tensor.shape.clone(),
            weights.read(tensor).map_err(|error| error.to_string())?,
        ))
    };
    weights.tensors().iter().map(tensor).collect()
}

#[test]
fn golden_zero_to_fp32_is_what_deepspeed_extracts() {
    let both = cases(RUNS).into_iter().chain(cases("checkpoint/pipeline_moe"));
    golden().each_path("checkpoint", both, 21, |case| {
        let found = extracted(&case.join("ckpt"));
        match recorded(case) {
            Some(expected) => {
                assert_eq!(found.as_ref(), Ok(&expected), "{}", case.display());
                let dir = tempfile::tempdir().unwrap();
                let file = dir.path().join("pytorch_model.bin");
                Fp32Weights::open(&case.join("ckpt"), None, false, Unknown::Refuse)
                    .unwrap()
                    .write_pt(&file)
                    .unwrap();
                let written = PtFile::open(&file).unwrap();
                for ((name, value), (expected_name, _, bytes)) in
                    written.value().pairs().unwrap().iter().zip(&expected)
                {
                    assert_eq!(name.as_str(), Some(expected_name.as_str()));
                    assert_eq!(
                        &written.read_all(value.as_tensor().unwrap()).unwrap(),
                        bytes,
                        "{expected_name}"
                    );
                }
            }
            None => {
                let refused = case.join("zero_to_fp32.error.json").is_file();
                assert_eq!(found.is_err(), refused, "{}: {found:?}", case.display());
            }
        }
    });
}

fn target(dir: &Path) -> Target<'_> {
    Target { dir, tag: "imported", update_latest: true, retention: Retention::default(), fs: &Disk }
}

type Tensors = BTreeMap<(Kind, String), (Vec<u64>, Vec<u8>)>;

fn all(checkpoint: &Checkpoint) -> Tensors {
    let tensors = checkpoint.manifest().tensors.iter().map(|entry| {
        let mut bytes = Vec::new();
        checkpoint.read_bytes(entry, 0..entry.numel(), &mut bytes).unwrap();
        ((entry.kind.clone(), entry.name.clone()), (entry.shape.clone(), bytes))
    });
    tensors.collect()
}

fn imported(case: &Path, dir: &Path) -> Result<Checkpoint, String> {
    let path = import_deepspeed(&case.join("ckpt"), None, Unknown::Refuse, &target(dir));
    Checkpoint::open(&path.map_err(|error| error.to_string())?).map_err(|error| error.to_string())
}

/// Writes a file again with the entries of all its dictionaries in the opposite order.
fn turn_dictionaries(path: &Path) {
    fn turned(value: &Value) -> Value {
        let pairs = |pairs: &[(Value, Value)]| {
            pairs.iter().rev().map(|(key, value)| (key.clone(), turned(value))).collect()
        };
        match value {
            Value::Dict(entries) => Value::Dict(pairs(entries)),
            Value::OrderedDict(entries) => Value::OrderedDict(pairs(entries)),
            Value::List(items) => Value::List(items.iter().map(turned).collect()),
            other => other.clone(),
        }
    }
    rewrite(path, turned);
}

/// Copies a recorded checkpoint, and returns the files whose names end with `suffix`, in order.
fn copied(recorded: &Path, copy: &Path, suffix: &str) -> Vec<PathBuf> {
    for file in files_below(recorded, "") {
        let to = copy.join(file.strip_prefix(recorded).unwrap());
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(&file, &to).unwrap();
    }
    files_below(copy, suffix)
}

#[test]
fn in_which_order_a_rank_has_written_its_states_does_not_matter() {
    let mut compared = 0;
    for case in cases("checkpoint/runs") {
        let dir = tempfile::tempdir().unwrap();
        let Ok(expected) = imported(&case, &dir.path().join("expected")) else { continue };
        let states = copied(&case.join("ckpt"), &dir.path().join("ckpt"), "optim_states.pt");
        if states.len() < 2 {
            continue;
        }
        turn_dictionaries(&states[states.len() - 1]);
        let found = imported(dir.path(), &dir.path().join("found")).unwrap();
        assert!(all(&found) == all(&expected), "{}", case.display());
        compared += 1;
    }
    assert!(compared > 0 || !golden().is_default(), "no recorded checkpoint has states on two ranks");
}

#[test]
fn golden_checkpoints_as_the_trainer_has_them_written_bring_their_optimizer() {
    let mut compared = 0;
    for case in cases("checkpoint/runs") {
        let dir = tempfile::tempdir().unwrap();
        let Ok(expected) = imported(&case, &dir.path().join("expected")) else { continue };
        let modules = copied(&case.join("ckpt"), &dir.path().join("ckpt"), "model_states.pt");
        modules.iter().for_each(|module| as_the_trainer_writes(module, 2));
        let found = imported(dir.path(), &dir.path().join("found")).unwrap();
        assert!(all(&found) == all(&expected), "{}", case.display());
        let (found, expected) = (found.manifest(), expected.manifest());
        assert_eq!(found.origin.optimizer, expected.origin.optimizer, "{}", case.display());
        assert_eq!(found.origin.optimizer.as_deref(), Some("adam"), "{}", case.display());
        assert_eq!(found.training.groups, expected.training.groups, "{}", case.display());
        assert_eq!(found.training.scheduler, Some(serde_json::json!({ "last_batch_iteration": 1 })));
        let mut config = expected.config.clone();
        config.as_object_mut().unwrap().remove("optimizer");
        config["steps_per_print"] = "Infinity".into();
        assert_eq!(found.config, config, "{}", case.display());
        compared += 1;
    }
    assert!(compared > 8 || !golden().is_default(), "{compared}");
}

/// Adds numbers to the states of every parameter, as DeepSpeed's 1-bit optimizers keep them beside their tensors.
fn with_numbers(module: &Path, numbers: &[(&str, f64)]) {
    rewrite(module, |value| {
        let optimizer = value.get("optimizer").unwrap();
        let entries = optimizer.get("state").unwrap().pairs().unwrap().iter();
        let state = entries.map(|(id, entry)| {
            let more = |entry, (name, number): &(&str, f64)| with(&entry, name, Some(Value::Float(*number)));
            (id.clone(), numbers.iter().fold(entry.clone(), more))
        });
        let optimizer = with(optimizer, "state", Some(Value::Dict(state.collect())));
        with(value, "optimizer", Some(optimizer))
    });
}

#[test]
fn golden_numbers_among_states_are_carried_or_refused_and_never_dropped() {
    let Some(case) = golden().path("checkpoint/runs/z0_fp32_ws2") else { return };
    let with = |numbers: &[(&str, f64)]| {
        let dir = tempfile::tempdir().unwrap();
        let modules = copied(&case.join("ckpt"), &dir.path().join("ckpt"), "model_states.pt");
        modules.iter().for_each(|module| with_numbers(module, numbers));
        imported(dir.path(), &dir.path().join("found"))
    };
    // The intervals of 0/1 Adam follow from the step; how far ranks have gone since they met does not.
    let intervals = [("var_interval", 4.0), ("local_step_counter", 3.0)];
    assert!(with(&[&intervals[..], &[("lrs", 0.0)]].concat()).is_ok());
    let refused = with(&[&intervals[..], &[("lrs", 0.25)]].concat()).err().unwrap();
    assert!(refused.contains("between two meetings of 0/1 Adam's ranks"), "{refused}");
    let refused = with(&[("mystery", 1.0)]).err().unwrap();
    assert!(refused.contains("the number 'mystery'"), "{refused}");
    // 1-bit LAMB steps by its ratios.
    let ratios = [("lamb_coeff_freeze", 0.5), ("last_factor", 1.25), ("scaling_coeff", 2.0)];
    let found = with(&ratios).unwrap();
    let per_parameter = &found.manifest().training.per_parameter;
    assert!(!per_parameter.is_empty() && per_parameter.values().all(|numbers| numbers == &[0.5, 1.25, 2.0]));
    assert!(with(&[]).unwrap().manifest().training.per_parameter.is_empty());
}

#[test]
fn golden_states_of_an_optimizer_that_nobody_names_are_told_by_their_names() {
    let Some(case) = golden().path("checkpoint/runs/z1_fp32_ws2") else { return };
    let dir = tempfile::tempdir().unwrap();
    let modules = copied(&case.join("ckpt"), &dir.path().join("ckpt"), "model_states.pt");
    modules.iter().for_each(|module| {
        // What is no plain data takes nothing else of the configuration with it.
        let bytes = Value::Bytes(vec![1, 2, 3]);
        rewrite(module, |value| {
            let config =
                with(&with(value.get("ds_config").unwrap(), "optimizer", None), "mine", Some(bytes.clone()));
            with(value, "ds_config", Some(config))
        });
    });
    for states in files_below(&dir.path().join("ckpt"), "optim_states.pt") {
        rewrite(&states, |value| renamed(value, "exp_avg_sq", "exp_inf"));
    }
    let found = imported(dir.path(), &dir.path().join("found")).unwrap();
    let said = found.manifest().origin.optimizer.clone().unwrap();
    assert_eq!(said, "an optimizer that is not named, with exp_avg, exp_inf");
    assert!(found.manifest().config["gradient_clipping"] == 0.5, "{}", found.manifest().config);
    assert!(found.manifest().config.get("mine").is_none(), "{}", found.manifest().config);
}

/// The same with another name for a key, wherever it stands.
fn renamed(value: &Value, key: &str, name: &str) -> Value {
    let pairs = |pairs: &[(Value, Value)]| {
        let named =
            |found: &Value| if found.as_str() == Some(key) { Value::str(name) } else { found.clone() };
        pairs.iter().map(|(found, value)| (named(found), renamed(value, key, name))).collect()
    };
    match value {
        Value::Dict(entries) => Value::Dict(pairs(entries)),
        Value::OrderedDict(entries) => Value::OrderedDict(pairs(entries)),
        other => other.clone(),
    }
}

#[test]
fn golden_files_that_have_changed_places_are_refused() {
    let with_two = |case: &PathBuf| files_below(&case.join("ckpt"), "optim_states.pt").len() > 1;
    golden().each_path(RUNS, cases(RUNS).into_iter().filter(with_two), 16, |case| {
        let dir = tempfile::tempdir().unwrap();
        let states = copied(&case.join("ckpt"), &dir.path().join("ckpt"), "optim_states.pt");
        let aside = dir.path().join("aside");
        for (from, to) in [(&states[0], &aside), (&states[1], &states[0]), (&aside, &states[1])] {
            std::fs::rename(from, to).unwrap();
        }
        let error = imported(dir.path(), &dir.path().join("out")).err().expect("swapped ranks were imported");
        let written = states[1].file_name().unwrap().to_string_lossy();
        assert!(error.starts_with(&states[0].display().to_string()), "{error}");
        assert!(error.contains(&format!("was written as '{written}'")), "{error}");
        assert_eq!(extracted(&dir.path().join("ckpt")).err(), Some(error));
    });
}

#[test]
fn golden_universal_states_that_have_changed_places_are_refused() {
    let universal = cases(RUNS).into_iter().filter(|case| case.join("uni").is_dir());
    golden().each_path(RUNS, universal, 4, |case| {
        let dir = tempfile::tempdir().unwrap();
        let means = copied(&case.join("uni"), &dir.path().join("uni"), "/exp_avg.pt");
        let squares = means[0].with_file_name("exp_avg_sq.pt");
        std::fs::copy(&squares, &means[0]).unwrap();
        let folder = squares.ancestors().find(|folder| folder.join("zero").is_dir()).unwrap();
        let error = import_universal(folder, Unknown::Refuse, &target(&dir.path().join("out")));
        let error = error.expect_err("squares were imported as means").to_string();
        assert!(error.contains("exp_avg.pt: was written as 'exp_avg_sq.pt'"), "{error}");
    });
}

/// Every tensor of a recorded file, in order: a file of a module keeps them under `module`.
fn tensors_of(path: &Path) -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let file = PtFile::open(path).unwrap();
    let dict = file.value().get("module").unwrap_or(file.value());
    let tensors = dict.pairs().unwrap_or_default().iter();
    let tensors = tensors.filter_map(|(name, value)| Some((name.as_str()?, value.as_tensor()?)));
    tensors.map(|(name, t)| (name.to_owned(), t.shape.clone(), file.read_all(t).unwrap())).collect()
}

#[test]
fn golden_pipelines_and_mixtures_of_experts_bring_every_weight() {
    golden().each_path("checkpoint/pipeline_moe", cases("checkpoint/pipeline_moe"), 4, |case| {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint =
            imported(case, dir.path()).unwrap_or_else(|error| panic!("{}: {error}", case.display()));
        checkpoint.verify().unwrap();
        let mut compared = 0;
        for path in files_below(&case.join("ckpt"), "model_states.pt") {
            let file = path.file_name().unwrap().to_str().unwrap();
            let layer = file.strip_prefix("layer_").and_then(|rest| rest.split_once('-'));
            let prefix =
                layer.map_or(String::new(), |(layer, _)| format!("{}.", layer.parse::<u64>().unwrap()));
            for (name, shape, bytes) in tensors_of(&path) {
                // Where ZeRO kept it in f32, that stands for the weight.
                let full = format!("{prefix}{name}");
                let entry = checkpoint.entry(&Kind::Weight, &full).or(checkpoint.entry(&Kind::Master, &full));
                let entry = entry.unwrap_or_else(|| panic!("{}: {prefix}{name}", path.display()));
                let mut found = Vec::new();
                checkpoint.read_bytes(entry, 0..entry.numel(), &mut found).unwrap();
                assert_eq!((&entry.shape, &found), (&shape, &bytes), "{}: {name}", path.display());
                compared += 1;
            }
        }
        assert!(compared > 3 && compared == checkpoint.manifest().tensors.len(), "{}", case.display());
    });
}

#[test]
fn layers_of_which_slices_are_missing_are_refused() {
    for name in ["layer_00-model_01-model_states.pt", "layer_0_expert_1_mp_rank_01_model_states.pt"] {
        let dir = tempfile::tempdir().unwrap();
        let tag = dir.path().join("ckpt/step");
        std::fs::create_dir_all(&tag).unwrap();
        std::fs::write(dir.path().join("ckpt/latest"), "step").unwrap();
        std::fs::write(tag.join("mp_rank_00_model_states.pt"), b"").unwrap();
        std::fs::write(tag.join(name), b"").unwrap();
        let error = imported(dir.path(), &dir.path().join("out")).err().unwrap();
        assert!(error.contains("holds the slices {1} of its layers: some are missing"), "{name}: {error}");
    }
}

#[test]
fn golden_imports_hold_the_weights_at_the_save() {
    golden().each_path(RUNS, cases(RUNS), 17, |case| {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint =
            imported(case, dir.path()).unwrap_or_else(|error| panic!("{}: {error}", case.display()));
        let run = ferrospeed_testkit::tensors::read(&case.join("run.safetensors"));
        let meta = read_json(&case.join("meta.json"));
        let mut compared = 0;
        for (name, saved) in run.iter().filter_map(|(key, value)| Some((key.strip_prefix("saved.")?, value)))
        {
            let Some(entry) = checkpoint.weights(name) else {
                // Only what the save was asked to leave out may be missing.
                let frozen = meta["model"]["freeze"].as_str().is_some_and(|prefix| name.starts_with(prefix));
                let module = files_below(&case.join("ckpt"), "_model_states.pt").remove(0);
                let module = PtFile::open(&module).unwrap();
                let is_there = module.value().get("module").is_some_and(|module| module.get(name).is_some());
                assert!(frozen && !is_there, "{}: {name} was not imported", case.display());
                continue;
            };
            let mut values = vec![0.0; entry.numel() as usize];
            checkpoint.read_f32(entry, 0..entry.numel(), &mut values).unwrap();
            if checkpoint.manifest().origin.dtype == Dtype::BF16 {
                values.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value).to_f32());
            }
            assert_eq!(values, saved.floats(), "{}: {name}", case.display());
            compared += 1;
        }
        assert!(compared > 0, "{}", case.display());
        let training = &checkpoint.manifest().training;
        assert_eq!(training.global_steps, meta["steps_before_save"].as_u64().unwrap(), "{}", case.display());
        assert_eq!(training.optimizer_steps, training.global_steps, "{}", case.display());
        assert!(!training.groups.is_empty() && training.groups.iter().all(|group| !group.params.is_empty()));
        for (key, value) in meta["client_state_saved"].as_object().into_iter().flatten() {
            assert_eq!(&checkpoint.manifest().client_state[key], value, "{}: {key}", case.display());
        }
    });
}

/// `save_16bit_model` writes what the checkpoint of the same moment holds, in the run's type.
#[test]
fn golden_16bit_models_hold_the_imported_weights() {
    let saved = |case: &Path| case.join("m16/pytorch_model.bin");
    let with_one = cases(RUNS).into_iter().filter(|case| saved(case).is_file());
    golden().each_path(RUNS, with_one, 16, |case| {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = imported(case, dir.path()).unwrap();
        let file = PtFile::open(&saved(case)).unwrap();
        let mut compared = 0;
        for (name, value) in file.value().pairs().unwrap() {
            let (name, stored) = (name.as_str().unwrap(), value.as_tensor().unwrap());
            // What the save of the checkpoint was asked to leave out is in this file alone.
            let Some(entry) = checkpoint.weights(name) else { continue };
            let mut values = vec![0.0; entry.numel() as usize];
            checkpoint.read_f32(entry, 0..entry.numel(), &mut values).unwrap();
            let bytes: Vec<u8> = match stored.dtype {
                Dtype::BF16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
                Dtype::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            };
            assert_eq!((&stored.shape, file.read_all(stored).unwrap()), (&entry.shape, bytes), "{name}");
            compared += 1;
        }
        assert!(compared > 0, "no weight is in both");
    });
}

#[test]
fn golden_universal_checkpoints_hold_what_their_sources_hold() {
    let universal = cases(RUNS).into_iter().filter(|case| case.join("uni").is_dir());
    golden().each_path(RUNS, universal, 4, |case| {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let source = imported(case, dir.path()).unwrap();
        let folder = std::fs::read_to_string(case.join("uni/latest_universal")).unwrap();
        let path =
            import_universal(&case.join("uni").join(folder.trim()), Unknown::Refuse, &target(other.path()))
                .unwrap_or_else(|error| panic!("{}: {error}", case.display()));
        let universal = Checkpoint::open(&path).unwrap();
        assert_eq!(all(&universal), all(&source), "{}", case.display());
        assert_eq!(universal.manifest().training, source.manifest().training, "{}", case.display());
    });
}

fn keys(json: &Json) -> Vec<&str> {
    json.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn golden_exports_follow_the_recorded_schema_and_extract_to_the_same_weights() {
    let extracted_there = cases(RUNS).into_iter().filter_map(|case| recorded(&case).map(|_| case));
    golden().each_path(RUNS, extracted_there, 14, |case| {
        let expected = recorded(case).expect("it was there");
        let meta = read_json(&case.join("meta.json"));
        let (stage, ranks) = (meta["stage"].as_u64().unwrap(), meta["world_size"].as_u64().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = imported(case, dir.path()).unwrap();
        for (stage, ranks) in [(stage, ranks), (1, 1), (2, 3), (3, 3), (3, 2)] {
            let out = tempfile::tempdir().unwrap();
            export_deepspeed(
                &checkpoint,
                out.path(),
                ExportOptions { stage: stage as u8, ranks, expert_ranks: 1, spelling: Spelling::Files },
            )
            .unwrap();
            let script = out.path().join("zero_to_fp32.py");
            let can_run = std::fs::metadata(&script).unwrap().permissions().mode() & 0o111 != 0;
            assert!(can_run && std::fs::read_to_string(&script).unwrap().starts_with("#!"));
            let found = extracted(out.path()).unwrap_or_else(|error| panic!("{}: {error}", case.display()));
            // The order is that of the layout. Stage 1 lists no frozen parameters, so DeepSpeed extracts none of its files.
            let is_listed = |name: &str| stage > 1 || checkpoint.entry(&Kind::Weight, name).is_none();
            let sorted = |tensors: &[(String, Vec<u64>, Vec<u8>)]| {
                let mut sorted: Vec<_> =
                    tensors.iter().filter(|tensor| is_listed(&tensor.0)).cloned().collect();
                sorted.sort();
                sorted
            };
            let what = format!("{}: stage {stage}, {ranks} ranks", case.display());
            assert_eq!(sorted(&found), sorted(&expected), "{what}");
            // And it imports to what it was exported from.
            let again = tempfile::tempdir().unwrap();
            let path = import_deepspeed(out.path(), None, Unknown::Refuse, &target(again.path())).unwrap();
            let again = Checkpoint::open(&path).unwrap();
            assert_eq!(all(&again), all(&checkpoint), "{}: stage {stage}, {ranks} ranks", case.display());
        }
        let (out, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let universal = export_universal(&checkpoint, out.path(), Spelling::Files).unwrap();
        let path = import_universal(&universal, Unknown::Refuse, &target(again.path())).unwrap();
        assert_eq!(all(&Checkpoint::open(&path).unwrap()), all(&checkpoint), "{}: universal", case.display());

        let out = tempfile::tempdir().unwrap();
        export_deepspeed(
            &checkpoint,
            out.path(),
            ExportOptions { stage: stage as u8, ranks, expert_ranks: 1, spelling: Spelling::Files },
        )
        .unwrap();
        for file in std::fs::read_dir(out.path().join("imported")).unwrap() {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let dump = case.join(format!("dump.{name}.json"));
            assert!(dump.is_file(), "{}: DeepSpeed wrote no {name}", case.display());
            let dump = read_json(&dump);
            let value = PtFile::open(&path).unwrap();
            let own = |value: &ferrospeed_checkpoint::pt::Value| -> Vec<String> {
                value.pairs().unwrap().iter().map(|(key, _)| key.as_str().unwrap().to_owned()).collect()
            };
            assert_eq!(own(value.value()), keys(&dump), "{}: {name}", case.display());
            if let Some(state) = value.value().get("optimizer_state_dict") {
                assert_eq!(own(state), keys(&dump["optimizer_state_dict"]), "{}: {name}", case.display());
            }
        }
    });
}
