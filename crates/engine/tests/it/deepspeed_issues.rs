//! What DeepSpeed's users were hurt by, and the test that keeps it from happening here: by the number of the issue.
//!
//! Most are covered by tests that were written for what they protect, in other crates too; the table says which, and that they are
//! there. What none of them does stands below.

use super::common::disk::{COMBINATIONS, offloaded};
use super::common::{config, device, on_ranks};
use ferrospeed_engine::{Options, Setup, initialize_model};
use ferrospeed_nn::{Init, Linear};
use ferrospeed_tensor::{DType, Initializer, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

/// (the issue, what went wrong, the file of the test, the test)
const COVERED: &[(&str, &str, &str, &str)] = &[
    (
        "DeepSpeed#966",
        "stages 0 to 3 train to different numbers",
        "engine/tests/it/equality.rs",
        "stages_agree_over_precisions_accumulation_clipping_and_ranks",
    ),
    (
        "DeepSpeed#7718",
        "the norm of gradients in stage 2 is another one; the same test compares norms as bits",
        "engine/tests/it/equality.rs",
        "stages_agree_over_precisions_accumulation_clipping_and_ranks",
    ),
    (
        "DeepSpeed#8224",
        "a submodule that is used twice trains wrongly in bf16",
        "engine/tests/it/parameters.rs",
        "parameters_of_every_kind_train_alike_in_all_stages",
    ),
    (
        "DeepSpeed#6351",
        "the size of buckets changes results",
        "engine/tests/it/equality.rs",
        "overlap_buckets_and_threads_change_no_bit",
    ),
    (
        "peft#2500",
        "frozen weights under an adapter stay gathered, and memory grows",
        "engine/tests/it/adapters/mod.rs",
        "what_is_frozen_takes_its_own_bytes_once_and_nothing_else",
    ),
    (
        "DeepSpeed#3810, #2898, #5405",
        "a run does not go on with another number of ranks",
        "engine/tests/it/checkpoint.rs",
        "masters_and_states_survive_other_ranks_stages_and_precisions",
    ),
    (
        "DeepSpeed#6691",
        "a run goes on from a universal checkpoint as if it began",
        "engine/tests/it/checkpoint_golden.rs",
        "golden_universal_checkpoints_load_on_other_ranks_and_stages",
    ),
    (
        "DeepSpeed#3582, #4025",
        "saving takes the memory of a whole model",
        "engine/tests/it/offload_faults.rs",
        "a_checkpoint_of_offloaded_state_passes_through_memory_in_pieces",
    ),
    (
        "DeepSpeed#7461",
        "a mixture hangs in stage 3 when ranks choose other experts",
        "engine/tests/it/experts.rs",
        "idle_experts_disjoint_choices_and_short_batches_train_as_on_one_rank_in_every_stage",
    ),
    (
        "generation in stage 3",
        "ranks with other numbers of prompts hang",
        "serve/tests/it/hybrid.rs",
        "ranks_with_other_texts_or_none_generate_together_in_every_stage",
    ),
    (
        "DeepSpeed#3062, #4871",
        "tensors of a few numbers on NVMe",
        "engine/tests/it/deepspeed_issues.rs",
        "tensors_of_a_few_numbers_train_on_a_disk_as_in_memory_deepspeed_3062_4871",
    ),
];

#[test]
fn every_wound_has_its_test() {
    let crates = ferrospeed_testkit::golden::repository_root().join("crates");
    for (issue, what, file, test) in COVERED {
        let source = std::fs::read_to_string(crates.join(file)).unwrap_or_default();
        let is_there = source.contains(&format!("#[test]\nfn {test}()"));
        assert!(is_there, "{issue} ({what}): {file} has no test {test}; name the one that covers it now");
    }
}

/// One step's weights of a model whose tensors are all smaller than a sector.
fn tiny(ranks: usize, value: Value) -> Vec<Vec<u32>> {
    on_ranks(ranks, move |world| {
        let init = Init::root();
        let layers =
            [Linear::new(&init.at("first"), 3, 2, true), Linear::new(&init.at("second"), 2, 1, true)];
        let scalar = init.param("scalar", [1], Initializer::Constant(0.7));
        let parameters = init.parameters();
        let rank = world.rank();
        let setup = Setup::new(config(&value, world.size()), world, device(1));
        let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
        for step in 0..3 {
            let values: Vec<f32> = (0..6).map(|at| ((at * 3 + rank + step) as f32).sin()).collect();
            let x = Tensor::from_f32(&values, [2, 3], DType::BF16, engine.device()).unwrap();
            let loss = engine
                .forward(|_| {
                    let hidden = ops::tanh(&layers[0].forward(&x)?)?;
                    ops::mean(&ops::square(&ops::mul(&layers[1].forward(&hidden)?, &scalar)?)?)
                })
                .unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        let bits = |param| engine.store().full(param, Which::Weight).unwrap().into_iter().map(f32::to_bits);
        parameters.as_slice().iter().flat_map(bits).collect()
    })
}

#[test]
fn tensors_of_a_few_numbers_train_on_a_disk_as_in_memory_deepspeed_3062_4871() {
    let folder = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 4] {
        let plain = json!({
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": true},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 1},
        });
        let expected = tiny(ranks, plain.clone());
        for sections in COMBINATIONS {
            let away = offloaded(plain.clone(), sections, folder.path());
            assert_eq!(tiny(ranks, away), expected, "{ranks} ranks, {sections:?}");
        }
    }
}
