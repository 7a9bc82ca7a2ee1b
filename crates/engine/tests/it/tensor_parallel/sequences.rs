//! Slices of layers and parts of sequences at once: data × sequence × tensor.

use std::sync::Arc;

use ferrospeed_comm::topology::{DATA, MODEL};
use ferrospeed_comm::{Mesh, ProcessTopology, SEQUENCE};
use ferrospeed_engine::{Options, Setup, initialize_model};
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_nn::{SequenceMethod, SequenceParallel};
use ferrospeed_zero::access::Which;
use serde_json::Value;

use super::{Model, Outcome, STEPS, compare, configuration, families, step, train, wholes};
use crate::common::{config, device, on_ranks};

/// A run on a mesh of so many data ranks, parts of a sequence and slices of a layer.
fn train_on(
    [data, sequence, tensor]: [usize; 3],
    method: SequenceMethod,
    model: &Value,
    stage: u8,
) -> Vec<Outcome> {
    let (model, value) = (Arc::new(model.clone()), configuration(stage, data));
    on_ranks(data * sequence * tensor, move |world| {
        let axes = [(DATA, data), (SEQUENCE, sequence), (MODEL, tensor)];
        let mesh = Mesh::new(world.clone(), ProcessTopology::new(axes).unwrap()).unwrap();
        let mut model = Model::in_slices(&model, &mesh.tensor().unwrap(), Between::AllTokens);
        if let Model::Decoder(decoder) = &mut model {
            let group = mesh.sequence().unwrap();
            decoder.set_sequence_parallel(Some(SequenceParallel::new(group, method)));
        }
        let mut options = Options::default();
        options.spread_over(&mesh).unwrap();
        let setup = Setup::new(config(&value, data), world, device(1));
        let mut engine = initialize_model(&setup, model.parameters(), options).unwrap();
        let mut outcome =
            Outcome { first_weights: wholes(&engine, &model, Which::Weight), ..Outcome::default() };
        (0..STEPS).for_each(|number| step(&mut engine, &model, number, &mut outcome));
        outcome.weights = wholes(&engine, &model, Which::Weight);
        outcome
    })
}

#[test]
fn slices_of_shared_sequences_train_as_the_whole_does() {
    for model in families().into_iter().filter(|model| model["model_type"] != "bert") {
        let kind = model["model_type"].as_str().unwrap();
        let whole = train(1, 1, &model, 0);
        for method in [SequenceMethod::Ulysses, SequenceMethod::Ring] {
            let found = train_on([1, 2, 2], method, &model, 1);
            compare(&found, &whole, &format!("{kind}, {method:?}"));
        }
    }
}

#[test]
fn every_stage_trains_on_a_mesh_of_three_axes() {
    let models = families();
    for (model, method) in [(&models[0], SequenceMethod::Ring), (&models[1], SequenceMethod::Ulysses)] {
        let whole = train(2, 1, model, 0);
        for stage in 0..=3 {
            let found = train_on([2, 2, 2], method, model, stage);
            compare(&found, &whole, &format!("{}, {method:?}, stage {stage}", model["model_type"]));
        }
    }
}
