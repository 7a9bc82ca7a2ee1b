//! DeepSpeed's files of a pipeline: read as recorded (`fixtures/record_pipeline.py` says by which versions), and written so
//! that they read back.

use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::deepspeed::{export_pipeline, import_deepspeed};
use ferrospeed_checkpoint::pt::{PtFile, Unknown};
use ferrospeed_checkpoint::{Checkpoint, Disk, Kind, Retention, Target};
use serde_json::Value;

fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pipeline-zero1")
}

fn try_imported(from: &Path, to: &Path) -> Result<Checkpoint, String> {
    let target =
        Target { dir: to, tag: "imported", update_latest: true, retention: Retention::default(), fs: &Disk };
    let path = import_deepspeed(from, None, Unknown::Refuse, &target).map_err(|error| error.to_string())?;
    Ok(Checkpoint::open(&path).unwrap())
}

fn values(checkpoint: &Checkpoint, kind: &Kind, name: &str) -> Vec<f32> {
    let entry = checkpoint.entry(kind, name).unwrap_or_else(|| panic!("{kind:?} of {name}"));
    let mut values = vec![0.0; entry.numel() as usize];
    checkpoint.read_f32(entry, 0..entry.numel(), &mut values).unwrap();
    values
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

/// Every weight and moment, by kind and name.
fn all(checkpoint: &Checkpoint) -> Vec<(String, String, Vec<u64>, Vec<u32>)> {
    let bits = |kind: &Kind, name: &str| values(checkpoint, kind, name).iter().map(|v| v.to_bits()).collect();
    let entries = checkpoint.manifest().tensors.iter();
    let mut all: Vec<_> = entries
        .map(|entry| {
            let bits = bits(&entry.kind, &entry.name);
            (format!("{:?}", entry.kind), entry.name.clone(), entry.shape.clone(), bits)
        })
        .collect();
    all.sort();
    all
}

/// A copy of the recording, to be spoilt.
fn copied(to: &Path) {
    let folder = to.join("global_step3");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(recorded().join("latest"), to.join("latest")).unwrap();
    for entry in std::fs::read_dir(recorded().join("global_step3")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
}

#[test]
fn weights_and_moments_of_stages_are_read_where_each_rank_left_them() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = try_imported(&recorded(), folder.path()).unwrap();
    let expected: Value =
        serde_json::from_slice(&std::fs::read(recorded().join("expected.json")).unwrap()).unwrap();
    let tensors = expected["tensors"].as_object().unwrap();
    // Two layers with biases, and the weight that the ends share.
    assert_eq!(tensors.len(), 5);
    for (name, weights) in tensors {
        // The shared weight is called after the first layer that has it.
        let name = name.replace("tied_modules.ends.", "0.");
        let (before, after) = (numbers(&weights["before"]), numbers(&weights["after"]));
        assert_eq!(values(&checkpoint, &Kind::Master, &name), after, "{name}");
        // The last step is what Adam makes of the moments, so they are this parameter's and no other's.
        let [mean, square] =
            ["exp_avg", "exp_avg_sq"].map(|state| values(&checkpoint, &Kind::State(state.to_owned()), &name));
        for (at, (mean, square)) in mean.iter().zip(&square).enumerate() {
            let (mean, square) = (f64::from(*mean), f64::from(*square));
            let corrected = (mean / (1.0 - 0.9f64.powi(3)), square / (1.0 - 0.999f64.powi(3)));
            let step = 0.01 * corrected.0 / (corrected.1.sqrt() + 1e-8);
            let found = f64::from(before[at]) - f64::from(after[at]);
            assert!((step - found).abs() < 1e-6, "{name}[{at}]: {found}, not {step}");
        }
    }
    let manifest = checkpoint.manifest();
    let training = &manifest.training;
    assert_eq!((training.global_steps, training.optimizer_steps, training.groups.len()), (3, 3, 1));
    let mut names = training.groups[0].params.clone();
    names.sort();
    assert_eq!(names, ["0.weight", "2.bias", "2.weight", "3.bias", "3.weight"]);
    assert_eq!(manifest.tensors.len(), 3 * 5, "weights and two states, each once");
    assert_eq!(manifest.origin.optimizer.as_deref(), Some("adam"));
}

#[test]
fn a_stage_without_its_optimizer_files_is_named() {
    let folder = tempfile::tempdir().unwrap();
    copied(folder.path());
    for rank in 0..2 {
        let name = format!("global_step3/zero_pp_rank_{rank}_mp_rank_01_optim_states.pt");
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    let error = try_imported(folder.path(), &folder.path().join("to")).err().unwrap();
    assert!(error.contains("mp_rank_01_model_states.pt") && error.contains("missing"), "{error}");
}

#[test]
fn a_missing_rank_of_a_stage_is_found() {
    let folder = tempfile::tempdir().unwrap();
    copied(folder.path());
    std::fs::remove_file(folder.path().join("global_step3/zero_pp_rank_1_mp_rank_01_optim_states.pt"))
        .unwrap();
    let error = try_imported(folder.path(), &folder.path().join("to")).err().unwrap();
    assert!(error.contains("mp_rank_01"), "{error}");
}

#[test]
fn stages_are_written_as_deepspeed_names_them_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = try_imported(&recorded(), &folder.path().join("ours")).unwrap();
    for (ranks, boundaries) in [(1, vec![0, 3, 6]), (2, vec![0, 1, 3, 4]), (3, vec![0, 4])] {
        let out = folder.path().join(format!("out-{ranks}"));
        export_pipeline(&checkpoint, &out, ranks, &boundaries).unwrap();
        let files = out.join("imported");
        let mut names: Vec<String> = std::fs::read_dir(&files)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let mut expected = vec![
            "layer_00-model_states.pt".to_owned(),
            "layer_02-model_states.pt".to_owned(),
            "layer_03-model_states.pt".to_owned(),
        ];
        for stage in 0..boundaries.len() - 1 {
            expected.push(format!("mp_rank_{stage:02}_model_states.pt"));
            expected.extend(
                (0..ranks).map(|rank| format!("zero_pp_rank_{rank}_mp_rank_{stage:02}_optim_states.pt")),
            );
        }
        expected.sort();
        assert_eq!(names, expected);
        let module = PtFile::open(&files.join("mp_rank_00_model_states.pt")).unwrap();
        assert_eq!(module.value().get("mp_world_size").unwrap().as_u64(), Some(boundaries.len() as u64 - 1));
        let back = try_imported(&out, &folder.path().join(format!("back-{ranks}"))).unwrap();
        assert_eq!(all(&back), all(&checkpoint), "{ranks} ranks, {boundaries:?}");
        assert_eq!(back.manifest().training.groups[0].params.len(), 5);
    }
}

#[test]
fn what_is_no_list_of_layers_is_not_written_as_a_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = try_imported(&recorded(), &folder.path().join("ours")).unwrap();
    let refused = |ranks, boundaries: &[u64]| {
        let out = folder.path().join("out");
        let error = export_pipeline(&checkpoint, &out, ranks, boundaries).unwrap_err().to_string();
        assert!(!out.join("imported").exists());
        error
    };
    assert!(refused(1, &[0, 2, 3]).contains("is in none of 3 layers"));
    for boundaries in [&[0][..], &[1, 4], &[0, 3, 3]] {
        assert!(refused(1, boundaries).contains("make no pipeline"));
    }
    assert!(refused(0, &[0, 4]).contains("make no pipeline"));
}
