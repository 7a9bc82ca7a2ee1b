//! DeepSpeed's files of a mixture of experts: read as recorded (`fixtures/record_moe_zero1.py` says by which versions), and
//! written so that they read back.

use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::deepspeed::{ExportOptions, Spelling, export_deepspeed, import_deepspeed};
use ferrospeed_checkpoint::pt::{PtFile, Unknown};
use ferrospeed_checkpoint::{Checkpoint, Disk, Kind, Retention, Target};
use serde_json::Value;

fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/moe-zero1")
}

fn imported(from: &Path, to: &Path) -> Checkpoint {
    let target =
        Target { dir: to, tag: "imported", update_latest: true, retention: Retention::default(), fs: &Disk };
    Checkpoint::open(&import_deepspeed(from, None, Unknown::Refuse, &target).unwrap()).unwrap()
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

/// Every weight, moment, count and option.
fn all(checkpoint: &Checkpoint) -> Vec<(Kind, String, Vec<u64>, Vec<u32>)> {
    let bits = |kind: &Kind, name: &str| values(checkpoint, kind, name).iter().map(|v| v.to_bits()).collect();
    let mut all: Vec<_> = checkpoint
        .manifest()
        .tensors
        .iter()
        .map(|entry| {
            (entry.kind.clone(), entry.name.clone(), entry.shape.clone(), bits(&entry.kind, &entry.name))
        })
        .collect();
    all.sort_by_key(|(kind, name, ..)| (format!("{kind:?}"), name.clone()));
    all
}

#[test]
fn weights_and_moments_of_experts_are_read_where_each_rank_left_them() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = imported(&recorded(), folder.path());
    let expected: Value =
        serde_json::from_slice(&std::fs::read(recorded().join("expected.json")).unwrap()).unwrap();
    let tensors = expected["tensors"].as_object().unwrap();
    // In, gate and out, and four experts of two layers.
    assert_eq!(tensors.len(), 5 + 4 * 4);
    let mut moved = 0;
    for (name, weights) in tensors {
        let (before, after) = (numbers(&weights["before"]), numbers(&weights["after"]));
        assert_eq!(values(&checkpoint, &Kind::Master, name), after, "{name}");
        // The last step is what Adam makes of the moments, so they are this parameter's and no other's.
        let [mean, square] =
            ["exp_avg", "exp_avg_sq"].map(|state| values(&checkpoint, &Kind::State(state.to_owned()), name));
        for (at, (mean, square)) in mean.iter().zip(&square).enumerate() {
            let (mean, square) = (f64::from(*mean), f64::from(*square));
            let corrected = (mean / (1.0 - 0.9f64.powi(2)), square / (1.0 - 0.999f64.powi(2)));
            let step = 0.01 * corrected.0 / (corrected.1.sqrt() + 1e-8);
            let found = f64::from(before[at]) - f64::from(after[at]);
            assert!((step - found).abs() < 1e-6, "{name}[{at}]: {found}, not {step}");
            moved += usize::from(found != 0.0);
        }
    }
    assert!(moved > 40, "{moved} elements moved");
    let training = &checkpoint.manifest().training;
    assert_eq!((training.global_steps, training.optimizer_steps, training.groups.len()), (2, 2, 1));
    assert_eq!(training.groups[0].params.len(), tensors.len());
    assert_eq!(checkpoint.manifest().origin.optimizer.as_deref(), Some("adam"));
}

#[test]
fn experts_are_written_as_deepspeed_names_them_and_read_back() {
    let first = tempfile::tempdir().unwrap();
    let checkpoint = imported(&recorded(), first.path());
    for (ranks, expert_ranks) in [(4, 2), (4, 4), (2, 1), (6, 2)] {
        let (out, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        export_deepspeed(
            &checkpoint,
            out.path(),
            ExportOptions { stage: 2, ranks, expert_ranks, spelling: Spelling::Files },
        )
        .unwrap();
        let folder = out.path().join("imported");
        let expert = PtFile::open(&folder.join("layer_0_expert_3_mp_rank_00_model_states.pt")).unwrap();
        let names: Vec<&str> =
            expert.value().pairs().unwrap().iter().filter_map(|(n, _)| n.as_str()).collect();
        let place = "moe.deepspeed_moe.experts.deepspeed_experts.3";
        assert_eq!(names, ["0.weight", "0.bias", "1.weight", "1.bias"].map(|rest| format!("{place}.{rest}")));
        let module = PtFile::open(&folder.join("mp_rank_00_model_states.pt")).unwrap();
        let held = module.value().get("module").unwrap().pairs().unwrap().len();
        assert_eq!(held, 5, "no expert among the rest");
        assert!(folder.join(format!("expp_rank_{}_mp_rank_00_optim_states.pt", expert_ranks - 1)).exists());
        assert_eq!(
            all(&imported(out.path(), again.path())),
            all(&checkpoint),
            "{ranks} ranks, {expert_ranks}"
        );
    }
    let out = tempfile::tempdir().unwrap();
    let refused = |stage, ranks, expert_ranks| {
        export_deepspeed(
            &checkpoint,
            out.path(),
            ExportOptions { stage, ranks, expert_ranks, spelling: Spelling::Files },
        )
        .unwrap_err()
        .to_string()
    };
    assert!(refused(2, 3, 2).contains("experts on 2 ranks need a multiple of as many"));
    assert!(refused(2, 3, 3).contains("cannot be shared by 3 ranks alike"));
    assert!(refused(3, 4, 2).contains("no mixtures of experts in stage 3"));
}
