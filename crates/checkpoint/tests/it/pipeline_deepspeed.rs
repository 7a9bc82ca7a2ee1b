//! DeepSpeed's files of a pipeline: read as recorded (`fixtures/record_pipeline.py` says by which versions), and written so
//! that they read back.

use std::path::{Path, PathBuf};

use super::common::recorded::{all, assert_made_the_last_step, try_imported};
use ferrospeed_checkpoint::deepspeed::{PipelineFiles, export_pipeline};
use ferrospeed_checkpoint::pt::{PtFile, write_pt};
use serde_json::Value;

fn recorded() -> PathBuf {
    fixture("pipeline-zero1")
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn expected(fixture: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(fixture.join("expected.json")).unwrap()).unwrap()
}

/// A copy of the recording, to be spoilt.
fn copied(to: &Path) {
    copied_from(&recorded(), to);
}

fn copied_from(from: &Path, to: &Path) {
    let folder = to.join("global_step3");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(from.join("latest"), to.join("latest")).unwrap();
    for entry in std::fs::read_dir(from.join("global_step3")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
}

#[test]
fn weights_and_moments_of_stages_are_read_where_each_rank_left_them() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = try_imported(&recorded(), folder.path()).unwrap();
    let expected = expected(&recorded());
    let tensors = expected["tensors"].as_object().unwrap();
    // Two layers with biases, and the weight that the ends share.
    assert_eq!(tensors.len(), 5);
    for (name, weights) in tensors {
        // The shared weight is called after the first layer that has it.
        assert_made_the_last_step(&checkpoint, &name.replace("tied_modules.ends.", "0."), weights, 3);
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
fn states_without_zero_are_those_of_the_layers_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let plain = fixture("pipeline-plain");
    let checkpoint = try_imported(&plain, &folder.path().join("ours")).unwrap();
    let expected = expected(&plain);
    let tensors = expected["tensors"].as_object().unwrap();
    assert_eq!(tensors.len(), 6);
    for (name, weights) in tensors {
        assert!(assert_made_the_last_step(&checkpoint, name, weights, 3) > 0, "{name}");
    }
    let manifest = checkpoint.manifest();
    let training = &manifest.training;
    assert_eq!((training.global_steps, training.optimizer_steps, training.groups.len()), (3, 3, 1));
    assert_eq!((training.groups[0].params.len(), training.groups[0].lr), (6, 0.01));
    assert_eq!(manifest.tensors.len(), 3 * 6, "weights and two states, each once");
    // Written without ZeRO, for the same stages and for others, they are read as they were.
    for boundaries in [&[0, 3, 6][..], &[0, 1, 3, 6]] {
        let out = folder.path().join(format!("out-{}", boundaries.len()));
        export_pipeline(
            &checkpoint,
            &out,
            PipelineFiles { boundaries, ranks: 2, slices: 1, tied: &[], zero_stage: 0 },
        )
        .unwrap();
        let names = std::fs::read_dir(out.join("imported")).unwrap();
        let names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(!names.iter().any(|name| name.contains("optim_states")), "{names:?}");
        let back = try_imported(&out, &folder.path().join(format!("back-{}", boundaries.len()))).unwrap();
        assert_eq!(all(&back), all(&checkpoint), "{boundaries:?}");
    }
}

#[test]
fn states_without_zero_of_a_module_that_another_stage_calls_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let tied = fixture("pipeline-tied");
    let checkpoint = try_imported(&tied, folder.path()).unwrap();
    let expected = expected(&tied);
    let tensors = expected["tensors"].as_object().unwrap();
    assert_eq!(tensors.len(), 5);
    for (name, weights) in tensors {
        let name = name.replace("tied_modules.ends.", "0.");
        assert!(assert_made_the_last_step(&checkpoint, &name, weights, 3) > 0, "{name}");
    }
    let manifest = checkpoint.manifest();
    assert_eq!((manifest.training.optimizer_steps, manifest.training.groups[0].params.len()), (3, 5));
    assert_eq!(manifest.tensors.len(), 3 * 5, "weights and two states, each once");
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
        let written = PipelineFiles { boundaries: &boundaries, ranks, slices: 1, tied: &[], zero_stage: 1 };
        export_pipeline(&checkpoint, &out, written).unwrap();
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
fn slices_of_layers_are_read_as_one_model_and_written_for_any_number() {
    let folder = tempfile::tempdir().unwrap();
    let sliced = fixture("pipeline-slices");
    let checkpoint = try_imported(&sliced, &folder.path().join("ours")).unwrap();
    let expected = expected(&sliced);
    let tensors = expected["tensors"].as_object().unwrap();
    // Four layers, and the one that both ends use.
    assert_eq!(tensors.len(), 2 * 5);
    for (name, weights) in tensors {
        let name = name.replace("tied_modules.ends.", "0.");
        assert!(assert_made_the_last_step(&checkpoint, &name, weights, 3) > 0, "{name}");
    }
    let manifest = checkpoint.manifest();
    assert_eq!(manifest.tensors.len(), 3 * 10, "weights and two states, each once");
    assert_eq!(manifest.training.groups[0].params.len(), 10);
    let aliases: Vec<_> =
        manifest.aliases.iter().map(|(alias, name)| (alias.as_str(), name.as_str())).collect();
    assert_eq!(aliases, [("5.bias", "0.bias"), ("5.weight", "0.weight")]);
    let divisions: [(u64, &[u64]); 4] =
        [(2, &[0, 3, 6]), (3, &[0, 1, 5, 6]), (1, &[0, 6]), (1, &[0, 2, 4, 6])];
    for ((slices, boundaries), zero_stage) in divisions.into_iter().flat_map(|of| [(of, 0), (of, 1)]) {
        let case = format!("{slices}-{}-{zero_stage}", boundaries.len());
        let out = folder.path().join(format!("out-{case}"));
        let files = PipelineFiles { boundaries, ranks: 2, slices, tied: &[], zero_stage };
        export_pipeline(&checkpoint, &out, files).unwrap();
        let own = out.join("imported");
        for slice in 0..slices {
            let of = if slices > 1 { format!("model_{slice:02}-") } else { String::new() };
            // Both tied layers have a file, with the same weights.
            let layer = |layer: u64| {
                PtFile::open(&own.join(format!("layer_{layer:02}-{of}model_states.pt"))).unwrap()
            };
            let weights = |file: &PtFile| {
                let tensor = file.value().get("weight").unwrap().as_tensor().unwrap().clone();
                (tensor.shape.clone(), file.read_f32(&tensor, 0..tensor.numel()).unwrap())
            };
            assert_eq!(weights(&layer(0)), weights(&layer(5)));
            assert_eq!(weights(&layer(1)).0, [6 / slices, 4]);
            assert_eq!(weights(&layer(2)).0, [4, 6 / slices]);
        }
        // Stages that use the tied module list it before their own layers.
        let last = (boundaries.len() as u64 - 1) * slices - 1;
        let module = PtFile::open(&own.join(format!("mp_rank_{last:02}_model_states.pt"))).unwrap();
        assert_eq!(module.value().get("mp_world_size").unwrap().as_u64(), Some(last + 1));
        if zero_stage > 0 {
            let group = &module.value().get("param_shapes").unwrap().items().unwrap()[0];
            assert_eq!(group.pairs().unwrap()[0].0.as_str(), Some("tied_modules.0.weight"));
        }
        let back = try_imported(&out, &folder.path().join(format!("back-{case}"))).unwrap();
        assert_eq!(all(&back), all(&checkpoint), "{case}");
        assert_eq!(back.manifest().aliases, manifest.aliases, "{case}");
        let (told, expected) = (&back.manifest().training, &manifest.training);
        assert_eq!(
            (told.optimizer_steps, told.groups[0].lr),
            (expected.optimizer_steps, expected.groups[0].lr)
        );
    }
}

#[test]
fn slices_that_nobody_explains_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    copied_from(&fixture("pipeline-slices"), folder.path());
    for rank in 0..4 {
        let path = folder.path().join(format!("global_step3/mp_rank_{rank:02}_model_states.pt"));
        let kept = PtFile::open(&path).unwrap().value().pairs().unwrap().to_vec();
        let kept: Vec<_> =
            kept.into_iter().filter(|(key, _)| key.as_str() != Some("universal_checkpoint_info")).collect();
        write_pt(&path, &ferrospeed_checkpoint::pt::Value::Dict(kept), &[], &mut |_, _, _| Ok(())).unwrap();
    }
    let error = try_imported(folder.path(), &folder.path().join("to")).err().unwrap();
    assert!(error.contains("weight' differs between 2 slices, and nothing says how it is cut"), "{error}");
    // A slice without its files is missed before anything is put together.
    for layer in 0..6 {
        let name = format!("global_step3/layer_{layer:02}-model_00-model_states.pt");
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    let error = try_imported(folder.path(), &folder.path().join("again")).err().unwrap();
    assert!(error.contains("some are missing"), "{error}");
}

#[test]
fn layers_that_are_said_to_be_tied_have_a_file_each() {
    let folder = tempfile::tempdir().unwrap();
    // The recording's last layer uses the first one's weight by a function, and has no file: the files do not tell.
    let checkpoint = try_imported(&recorded(), &folder.path().join("ours")).unwrap();
    assert!(checkpoint.manifest().aliases.is_empty());
    let written = |tied: &[Vec<u64>]| {
        let out = folder.path().join("out");
        let _ = std::fs::remove_dir_all(&out);
        let files = PipelineFiles { boundaries: &[0, 3, 6], ranks: 1, slices: 1, tied, zero_stage: 1 };
        export_pipeline(&checkpoint, &out, files).map(|_| out.join("imported"))
    };
    assert!(!written(&[]).unwrap().join("layer_05-model_states.pt").exists());
    let out = written(&[vec![0, 5]]).unwrap();
    assert!(out.join("layer_05-model_states.pt").exists());
    for stage in 0..2 {
        let module = PtFile::open(&out.join(format!("mp_rank_{stage:02}_model_states.pt"))).unwrap();
        let group = &module.value().get("param_shapes").unwrap().items().unwrap()[0];
        assert_eq!(group.pairs().unwrap()[0].0.as_str(), Some("tied_modules.0.weight"), "stage {stage}");
    }
    for (tied, why) in [
        (vec![vec![1, 5]], "the first of them has no parameters"),
        (vec![vec![]], "none is named"),
        (vec![vec![0]], "name at least two"),
        (vec![vec![0, 6]], "there is no layer 6; the pipeline ends with 5"),
        (vec![vec![0, 5, 5]], "layer 5 is named twice"),
        (vec![vec![0, 4], vec![0, 5]], "layer 0 is named twice"),
        (vec![vec![2, 3]], "the checkpoint has a '3."),
    ] {
        let error = written(&tied).unwrap_err().to_string();
        assert!(error.contains("cannot be tied") && error.contains(why), "{tied:?}: {error}");
        assert!(!folder.path().join("out/imported").exists(), "{tied:?}");
    }
    // Without a cut layer there is nothing to go by.
    let files = PipelineFiles { boundaries: &[0, 6], ranks: 1, slices: 2, tied: &[], zero_stage: 1 };
    let error = export_pipeline(&checkpoint, &folder.path().join("cut"), files).unwrap_err().to_string();
    assert!(error.contains("nothing says how layers are cut into 2 slices"), "{error}");
}

#[test]
fn what_is_no_list_of_layers_is_not_written_as_a_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = try_imported(&recorded(), &folder.path().join("ours")).unwrap();
    let refused_in = |ranks, boundaries: &[u64], zero_stage| {
        let out = folder.path().join("out");
        let files = PipelineFiles { boundaries, ranks, slices: 1, tied: &[], zero_stage };
        let error = export_pipeline(&checkpoint, &out, files).unwrap_err().to_string();
        assert!(!out.join("imported").exists());
        error
    };
    let refused = |ranks, boundaries: &[u64]| refused_in(ranks, boundaries, 1);
    assert!(refused_in(1, &[0, 6], 2).contains("ZeRO stage 2 cannot be combined with pipelines"));
    assert!(refused(1, &[0, 2, 3]).contains("is in none of 3 layers"));
    for boundaries in [&[0][..], &[1, 4], &[0, 3, 3]] {
        assert!(refused(1, boundaries).contains("make no pipeline"));
    }
    assert!(refused(0, &[0, 4]).contains("make no pipeline"));
    // Its last layer with parameters is 3, and few have none behind it.
    let beyond = refused(1, &[0, 2, 99]);
    assert!(beyond.contains("end with 99") && beyond.contains("is 3: end with 4"), "{beyond}");
    for (boundaries, bare) in [(&[0, 4], 0), (&[0, 6], 2)] {
        let out = folder.path().join(format!("out-{bare}"));
        let files = PipelineFiles { boundaries, ranks: 1, slices: 1, tied: &[], zero_stage: 1 };
        assert_eq!(export_pipeline(&checkpoint, &out, files).unwrap(), bare);
    }
}
