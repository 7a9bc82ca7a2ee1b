//! Checkpoints speak of wholes: any mesh loads any other's and goes on, and what is made of them is the same from all.

use std::path::Path;
use std::sync::Arc;

use ferrospeed_checkpoint::deepspeed::{
    ExportOptions, Fp32Weights, Spelling, export_deepspeed, export_universal,
};
use ferrospeed_checkpoint::pt::Unknown;
use ferrospeed_checkpoint::{Checkpoint, Kind};
use ferrospeed_engine::{LoadOptions, SaveOptions};
use ferrospeed_zero::access::Which;
use serde_json::Value;

use super::{Outcome, assert_near, configuration, families, on_ranks, start, step, wholes};

/// (ranks, slices, stage of ZeRO); all see the same batches, two data ranks as halves of them.
const MESHES: [(usize, usize, u8); 5] = [(1, 1, 0), (2, 2, 0), (4, 4, 1), (4, 2, 2), (4, 2, 3)];

/// Steps before the save, and behind it.
const BEFORE: usize = 2;
const BEHIND: usize = 2;

/// Models without dropout, whose losses do not depend on how a batch is shared out.
fn models() -> Vec<Value> {
    let mut models: Vec<Value> = families().drain(..2).collect();
    models[0]["resid_pdrop"] = 0.0.into();
    models[0]["embd_pdrop"] = 0.0.into();
    models
}

fn state(engine: &ferrospeed_engine::Engine, model: &super::Model) -> Vec<(String, Vec<f32>)> {
    let kinds = [Which::Weight, Which::State("exp_avg"), Which::State("exp_avg_sq")];
    kinds.into_iter().flat_map(|which| wholes(engine, model, which)).collect()
}

/// What the whole model is after loading, how it goes on, and the file of its weights.
type Loaded = (Vec<(String, Vec<f32>)>, Outcome, Vec<u8>);

fn load(dir: &Path, model: &Value, (ranks, tensor, stage): (usize, usize, u8)) -> Vec<Loaded> {
    let (dir, model) = (dir.to_path_buf(), Arc::new(model.clone()));
    let value = configuration(stage, ranks / tensor);
    on_ranks(ranks, move |world| {
        let (mut engine, decoder) = start(world, &model, &value, tensor);
        engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
        let loaded = state(&engine, &decoder);
        let out = dir.join(format!("weights-{ranks}-{tensor}-{stage}"));
        let path = engine.save_16bit_model(&out, "pytorch_model.bin", false).unwrap();
        let file = std::fs::read(path).unwrap();
        let mut outcome = Outcome::default();
        for number in BEFORE..BEFORE + BEHIND {
            step(&mut engine, &decoder, number, &mut outcome);
        }
        (loaded, outcome, file)
    })
}

/// All files below a folder, by name, with their bytes.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => open.push(path),
                false => {
                    let name = path.strip_prefix(folder).unwrap().display().to_string();
                    found.push((name, std::fs::read(path).unwrap()));
                }
            }
        }
    }
    found.sort();
    found
}

/// What `zero_to_fp32` makes of a checkpoint, and the universal files of its parameters.
fn exported(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let out = tempfile::tempdir().unwrap();
    let opened = Checkpoint::open(checkpoint).unwrap();
    opened.verify().unwrap();
    export_universal(&opened, out.path(), Spelling::Files).unwrap();
    let options = ExportOptions { stage: 2, ranks: 2, expert_ranks: 1, spelling: Spelling::Files };
    export_deepspeed(&opened, out.path(), options).unwrap();
    let fp32 = Fp32Weights::open(out.path(), Some("it"), false, Unknown::Refuse).unwrap();
    fp32.write_pt(&out.path().join("fp32.pt")).unwrap();
    let is_state = |name: &str| name.contains("/zero/") || name == "fp32.pt";
    files(out.path()).into_iter().filter(|(name, _)| is_state(name)).collect()
}

#[test]
fn any_mesh_goes_on_from_any_other_s_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for model in models() {
        let kind = model["model_type"].as_str().unwrap().to_owned();
        let whole = super::train(1, 1, &model, 0).remove(0);
        for from in MESHES {
            let (ranks, tensor, stage) = from;
            let dir = folder.path().join(format!("{kind}-{ranks}-{tensor}-{stage}"));
            let saved = {
                let (dir, model) = (dir.clone(), Arc::new(model.clone()));
                let value = configuration(stage, ranks / tensor);
                on_ranks(ranks, move |world| {
                    let (mut engine, decoder) = start(world, &model, &value, tensor);
                    let mut outcome = Outcome::default();
                    (0..BEFORE).for_each(|number| step(&mut engine, &decoder, number, &mut outcome));
                    engine.save_checkpoint(&dir, &SaveOptions::default()).unwrap();
                    state(&engine, &decoder)
                })
            };
            let mut file = None;
            for to in MESHES {
                for (rank, (loaded, outcome, weights)) in load(&dir, &model, to).into_iter().enumerate() {
                    let what = format!("{kind}: {from:?} to {to:?}, rank {rank}");
                    assert!(loaded == saved[0], "{what}: other values");
                    assert_eq!(*file.get_or_insert(weights.clone()), weights, "{what}: other weight files");
                    assert_near(&outcome.norms, &whole.norms[BEFORE..], &format!("{what}: norms"));
                    if to.0 == to.1 {
                        assert_near(&outcome.losses, &whole.losses[BEFORE..], &format!("{what}: losses"));
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_made_of_a_checkpoint_is_the_same_from_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let model = families().swap_remove(1);
    let first = folder.path().join("first");
    let save = |dir: std::path::PathBuf, from: Option<std::path::PathBuf>, mesh: (usize, usize, u8)| {
        let (model, value) = (Arc::new(model.clone()), configuration(mesh.2, mesh.0 / mesh.1));
        on_ranks(mesh.0, move |world| {
            let (mut engine, decoder) = start(world, &model, &value, mesh.1);
            match &from {
                Some(from) => drop(engine.load_checkpoint(from, &LoadOptions::default()).unwrap()),
                None => step(&mut engine, &decoder, 0, &mut Outcome::default()),
            }
            engine
                .save_checkpoint(&dir, &SaveOptions { tag: Some("it".into()), ..Default::default() })
                .unwrap();
        });
    };
    save(first.clone(), None, (2, 2, 0));
    let mut made = None;
    for mesh in MESHES {
        let dir = folder.path().join(format!("{mesh:?}"));
        save(dir.clone(), Some(first.clone()), mesh);
        let files = exported(&dir.join("it"));
        assert!(files.len() > 20, "{} files", files.len());
        let first = made.get_or_insert(files.clone());
        for ((name, bytes), (first_name, first_bytes)) in files.iter().zip(first.iter()) {
            assert!(name == first_name && bytes == first_bytes, "{mesh:?}: {name}");
        }
    }
    // A slice is one piece, however its rows lie in the whole.
    let checkpoint = Checkpoint::open(&first.join("it")).unwrap();
    let entry = checkpoint.entry(&Kind::Master, "model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!((entry.shape.as_slice(), entry.pieces.len()), (&[16, 24][..], 2));
    let norm = checkpoint.entry(&Kind::Master, "model.norm.weight").unwrap();
    assert!(norm.pieces.len() == 1 && norm.pieces[0].part.is_none());
}
