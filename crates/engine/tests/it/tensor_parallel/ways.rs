//! Slices with the other ways to train: recomputed blocks, accumulation, 16 bits, state elsewhere; and what is refused.

use std::sync::Arc;

use ferrospeed_comm::topology::{DATA, MODEL};
use ferrospeed_comm::{Mesh, ProcessTopology};
use ferrospeed_engine::{Options, Setup, activation_shelf, initialize_model};
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

use super::{
    Model, Outcome, assert_near, compare, configuration, families, on_ranks, start, step, train_by, wholes,
};
use crate::common::config;

/// The configuration of the other tests, changed.
fn changed(stage: u8, data: usize, change: impl Fn(&mut Value)) -> Value {
    let mut value = configuration(stage, data);
    change(&mut value);
    value
}

#[test]
fn accumulated_micro_batches_and_offloaded_state_are_those_of_the_whole() {
    let model = families().swap_remove(1);
    for change in [
        (|value: &mut Value| value["train_micro_batch_size_per_gpu"] = 1.into()) as fn(&mut Value),
        |value| value["zero_optimization"]["offload_optimizer"] = json!({"device": "cpu"}),
        |value| value["zero_optimization"]["overlap_comm"] = true.into(),
    ] {
        let whole = train_by(2, 1, &model, changed(2, 2, change));
        let found = train_by(4, 2, &model, changed(2, 2, change));
        for (rank, outcome) in found.iter().enumerate() {
            let wanted = &whole[rank / 2];
            assert_near(&outcome.losses, &wanted.losses, "losses");
            assert_near(&outcome.norms, &wanted.norms, "norms");
            for ((name, values), (_, reference)) in outcome.weights.iter().zip(&wanted.weights) {
                assert_near(values, reference, name);
            }
        }
    }
}

/// LAMB scales each step by norms of whole parameters: of slices they are summed over the ranks that hold them, and what several
/// ranks hold alike (norms' weights; with four slices, key-value heads that neighbours share) counts once.
#[test]
fn lamb_on_slices_scales_by_norms_of_wholes() {
    let lamb = |value: &mut Value| {
        value["optimizer"] =
            json!({"type": "Lamb", "params": {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.01}});
        value["zero_allow_untested_optimizer"] = true.into();
    };
    for model in families().into_iter().take(2) {
        for (ranks, tensor, stage) in [(2, 2, 0), (4, 4, 1), (4, 2, 1), (4, 2, 3)] {
            let whole = train_by(ranks / tensor, 1, &model, changed(stage, ranks / tensor, lamb));
            let found = train_by(ranks, tensor, &model, changed(stage, ranks / tensor, lamb));
            for (rank, outcome) in found.iter().enumerate() {
                let wanted = &whole[rank / tensor];
                let what = format!("{}, {tensor} slices, stage {stage}", model["model_type"]);
                assert_near(&outcome.losses, &wanted.losses, &what);
                assert_near(&outcome.norms, &wanted.norms, &what);
                for ((name, values), (_, reference)) in outcome.weights.iter().zip(&wanted.weights) {
                    assert_near(values, reference, &format!("{name} ({what})"));
                }
            }
        }
    }
}

#[test]
fn many_steps_with_dropout_and_clipping_stay_together() {
    let models = families();
    for model in [&models[0], &models[1]] {
        let losses = |ranks: usize, tensor: usize| {
            let (model, value) = (Arc::new(model.clone()), configuration(2, ranks / tensor));
            on_ranks(ranks, move |world| {
                let (mut engine, decoder) = start(world, &model, &value, tensor);
                let mut outcome = Outcome::default();
                (0..40).for_each(|number| step(&mut engine, &decoder, number % 2, &mut outcome));
                outcome
            })
        };
        let (whole, found) = (losses(2, 1), losses(4, 2));
        for (rank, outcome) in found.iter().enumerate() {
            let wanted = &whole[rank / 2];
            let apart = outcome.losses.iter().zip(&wanted.losses).map(|(a, b)| (a - b).abs());
            // Forty steps that amplify rounding, beside a loss that falls by far more.
            let (apart, fallen) = (apart.fold(0.0, f32::max), wanted.losses[0] - wanted.losses[39]);
            assert!(apart < 1e-3 && fallen > 0.3, "rank {rank}: {apart} apart, fallen by {fallen}");
            assert!(wanted.norms.iter().all(|norm| *norm > 0.05), "clipping was not active");
        }
    }
}

#[test]
fn ranks_with_tokens_of_their_own_between_layers_train_as_the_whole_does() {
    for mut model in families().into_iter().filter(|model| model["model_type"] != "bert") {
        // Each rank drops its own tokens' values, so only what drops nothing is the same.
        if model["model_type"] == "gpt2" {
            (model["resid_pdrop"], model["embd_pdrop"]) = (0.0.into(), 0.0.into());
        }
        let kind = model["model_type"].as_str().unwrap();
        let own_tokens = |value: &mut Value| value["tensor_parallel"] = json!({"sequence_parallel": true});
        let whole = [1, 2].map(|ranks| train_by(ranks, 1, &model, configuration(0, ranks)));
        for (ranks, tensor, stage) in [(2, 2, 0), (4, 4, 1), (4, 2, 3)] {
            let data = ranks / tensor;
            let found = train_by(ranks, tensor, &model, changed(stage, data, own_tokens));
            compare(
                &found,
                &whole[data - 1],
                &format!("{kind}, {ranks} ranks, {tensor} slices, stage {stage}"),
            );
        }
    }
}

#[test]
fn recomputed_blocks_and_dropped_attention_keep_ranks_together() {
    let mut model = families().swap_remove(0);
    model["attn_pdrop"] = 0.2.into();
    let model = Arc::new(model);
    let run = |section: Option<Value>| {
        let value = changed(3, 2, |value| {
            value["activation_checkpointing"] = section.clone().unwrap_or_else(|| json!({}))
        });
        let (model, recompute) = (model.clone(), section.is_some());
        on_ranks(4, move |world| {
            let mesh = Mesh::new(world.clone(), ProcessTopology::new([(DATA, 2), (MODEL, 2)]).unwrap());
            let slices = mesh.unwrap().tensor().unwrap();
            let (mut engine, mut decoder) = start(world, &model, &value, 2);
            if let (Model::Decoder(decoder), true) = (&mut decoder, recompute) {
                let section = &engine.config().activation_checkpointing;
                decoder.checkpoint_activations_on(activation_shelf(section, Some(&slices)));
            }
            let mut outcome = Outcome::default();
            (0..3).for_each(|number| step(&mut engine, &decoder, number, &mut outcome));
            (outcome.losses, wholes(&engine, &decoder, Which::Weight))
        })
    };
    let kept = run(None);
    let everything = json!({
        "partition_activations": true, "cpu_checkpointing": true, "synchronize_checkpoint_boundary": true,
    });
    for section in [json!({}), json!({"partition_activations": true}), everything] {
        // The same numbers are drawn again in backward, and ranks of a group never part.
        assert!(kept == run(Some(section.clone())), "other numbers when recomputed with {section}");
    }
    assert!(kept[0] == kept[1] && kept[2] == kept[3]);
}

#[test]
fn sixteen_bits_train_in_slices_within_their_rounding() {
    let model = families().swap_remove(1);
    for precision in ["bf16", "fp16"] {
        let value = |data| changed(1, data, |value| value[precision] = json!({"enabled": true}));
        let whole = train_by(1, 1, &model, value(1)).remove(0);
        for outcome in train_by(2, 2, &model, value(1)) {
            for (a, b) in outcome.losses.iter().zip(&whole.losses) {
                assert!((a - b).abs() < 2e-2, "{precision}: {:?}, not {:?}", outcome.losses, whole.losses);
            }
        }
    }
}

/// Why an engine for a model in two slices does not start.
fn refusal(change: fn(&mut Value), spread: bool) -> String {
    let model = Arc::new(families().swap_remove(1));
    let refused = on_ranks(2, move |world| {
        let mesh = Mesh::new(world.clone(), ProcessTopology::new([(DATA, 1), (MODEL, 2)]).unwrap()).unwrap();
        let model = Model::in_slices(&model, &mesh.tensor().unwrap(), Between::AllTokens);
        // What a GPU refuses is not what is asked here.
        let setup = Setup::new(config(&changed(0, 1, change), 1), world, ferrospeed_cpu::with_threads(1));
        let mut options = Options::default();
        if spread {
            options.spread_over(&mesh).unwrap();
        }
        initialize_model(&setup, model.parameters(), options).err().map(|error| error.to_string())
    });
    refused.into_iter().flatten().next().unwrap_or_default()
}

#[test]
fn what_does_not_work_on_slices_is_refused() {
    let one_bit = |value: &mut Value| {
        value["optimizer"] = json!({"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}});
    };
    let averaged = refusal(one_bit, true);
    assert!(averaged.contains("it averages over all ranks, and ranks hold slices"), "{averaged}");
    let more = refusal(|value| value["tensor_parallel"] = json!({"autotp_size": 4}), true);
    assert!(more.contains("asks for 4 slices of each layer, and there are 2"), "{more}");
    let unspread = refusal(|value| value["tensor_parallel"] = json!({"autotp_size": 2}), false);
    assert!(unspread.contains("call Options::spread_over"), "{unspread}");
    assert_eq!(refusal(|value| value["tensor_parallel"] = json!({"autotp_size": 2}), true), "");
}
