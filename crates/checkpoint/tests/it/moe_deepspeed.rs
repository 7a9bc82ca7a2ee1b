//! DeepSpeed's files of a mixture of experts: read as recorded (`fixtures/record_moe_zero1.py` says by which versions), and
//! written so that they read back.

use std::path::{Path, PathBuf};

use super::common::recorded::{all, assert_made_the_last_step, try_imported};
use ferrospeed_checkpoint::Checkpoint;
use ferrospeed_checkpoint::deepspeed::{ExportOptions, Spelling, export_deepspeed};
use ferrospeed_checkpoint::pt::PtFile;
use serde_json::Value;

fn recorded() -> PathBuf {
    fixture("moe-zero1")
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn imported(from: &Path, to: &Path) -> Checkpoint {
    try_imported(from, to).unwrap()
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
    let moved =
        tensors.iter().map(|(name, weights)| assert_made_the_last_step(&checkpoint, name, weights, 2));
    let moved: usize = moved.sum();
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

/// What 0.14.1 wrote: without ZeRO, where each expert group's rank has a file of numbered states, and with ZeRO 2, whose files
/// name some of the experts alone. Both are read by the order in which the model lists its parameters.
#[test]
fn states_that_are_not_named_are_those_of_the_model_in_its_order() {
    for (name, stage) in [("moe-0141-zero0", 0), ("moe-0141-zero2", 2)] {
        let recorded = fixture(name);
        let (first, out, again) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let checkpoint = imported(&recorded, first.path());
        let expected: Value =
            serde_json::from_slice(&std::fs::read(recorded.join("expected.json")).unwrap()).unwrap();
        let tensors = expected["tensors"].as_object().unwrap();
        // In, two gates and out, and four experts of two layers in each of two mixtures.
        assert_eq!(tensors.len(), 6 + 2 * 4 * 4);
        let moved =
            tensors.iter().map(|(name, weights)| assert_made_the_last_step(&checkpoint, name, weights, 2));
        assert!(moved.sum::<usize>() > 80, "{name}");
        let manifest = checkpoint.manifest();
        assert_eq!(manifest.origin.stage, stage);
        assert_eq!((manifest.training.optimizer_steps, manifest.training.groups.len()), (2, 1));
        assert_eq!(manifest.training.groups[0].params.len(), tensors.len());
        let options = ExportOptions { stage, ranks: 4, expert_ranks: 2, spelling: Spelling::Files };
        export_deepspeed(&checkpoint, out.path(), options).unwrap();
        assert_eq!(all(&imported(out.path(), again.path())), all(&checkpoint), "{name}");
    }
}

/// Two ranks had half of each mixture's experts. A rank that has all of them has them as the model lists them, which is not the
/// one rank's and then the other's.
#[test]
fn experts_that_were_on_two_ranks_lie_in_the_models_order_on_one() {
    let (first, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let checkpoint = imported(&fixture("moe-0141-zero2"), first.path());
    let options = ExportOptions { stage: 2, ranks: 1, expert_ranks: 1, spelling: Spelling::Files };
    export_deepspeed(&checkpoint, out.path(), options).unwrap();
    let file = out.path().join("imported/zero_pp_rank_0_mp_rank_00_optim_states.pt");
    let file = PtFile::open(&file).unwrap();
    let groups = file.value().get("optimizer_state_dict").unwrap().get("param_slice_mappings").unwrap();
    let experts = groups.items().unwrap()[1].pairs().unwrap();
    let experts: Vec<(&str, u32)> = experts
        .iter()
        .map(|(name, _)| {
            let (mixture, expert) = name.as_str().unwrap().split_once(".deepspeed_experts.").unwrap();
            (mixture, expert.split('.').next().unwrap().parse().unwrap())
        })
        .collect();
    assert_eq!(experts.len(), 2 * 4 * 4);
    let mut in_order = experts.clone();
    in_order.sort_unstable();
    assert_eq!(experts, in_order);
}
