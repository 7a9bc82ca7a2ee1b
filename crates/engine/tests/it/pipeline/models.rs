//! The models of these tests, and how they are trained: in stages, and whole.

use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Which {
    Mlp,
    Gpt2Tied,
    Llama,
    Mixtral,
    Bert,
}

/// Any model of these tests.
pub(crate) enum Family {
    Mlp(Trained<fn(&Tensor, &Tensor) -> Result<Tensor, TensorError>>, Box<Parameters>),
    Decoder(Box<Decoder>),
    Bert(Box<Bert>),
}

/// One of them, with its micro-batches, that writes down which of its layers ran and whether anything was recorded.
pub(crate) struct Model {
    pub(crate) family: Family,
    pub(crate) ran: std::sync::Mutex<Vec<(std::ops::Range<usize>, bool)>>,
}

impl From<Family> for Model {
    fn from(family: Family) -> Model {
        Model { family, ran: Default::default() }
    }
}

pub(crate) enum Batch {
    Pair((Tensor, Tensor)),
    Labelled((Tokens, Tensor)),
    Bert(Box<BertBatch>),
}

pub(crate) fn labelled(device: &Device, seed: usize) -> (Tokens, Tensor) {
    let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + seed + i * i) % 17) as i64).collect();
    let ids = Tensor::from_slice(&ids, [2, 7], device).unwrap();
    (Tokens::new(ids.clone()), ids)
}

pub(crate) fn mean_square(y: &Tensor, target: &Tensor) -> Result<Tensor, TensorError> {
    ops::mean(&ops::square(&ops::sub(y, target)?)?)
}

pub(crate) fn build(which: Which) -> Model {
    let decoder = |value: Value| match ModelConfig::from_value(&value, WindowRule::default()) {
        Ok(ModelConfig::Decoder(config)) => Family::Decoder(Box::new(Decoder::new(*config))),
        other => panic!("no decoder: {other:?}"),
    };
    let family = match which {
        Which::Mlp => {
            let init = Init::root();
            let mut layers = Sequential::new(&init);
            for _ in 0..4 {
                layers = layers
                    .add(|init| Linear::new(init, 6, 6, true))
                    .add(|_| Activation::Tanh)
                    .add(|_| Dropout { probability: 0.2 });
            }
            Family::Mlp(Trained { layers, loss: mean_square }, Box::new(init.parameters()))
        }
        Which::Gpt2Tied => decoder(json!({
            "model_type": "gpt2", "vocab_size": 17, "n_embd": 12, "n_layer": 6, "n_head": 3, "n_positions": 8,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        })),
        Which::Llama => decoder(json!({
            "model_type": "llama", "vocab_size": 17, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 6,
            "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 8, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        })),
        Which::Bert => match ModelConfig::from_value(
            &json!({
                "model_type": "bert", "architectures": ["BertForPreTraining"], "vocab_size": 17, "hidden_size": 12,
                "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 20,
                "max_position_embeddings": 8,
            }),
            WindowRule::default(),
        ) {
            Ok(ModelConfig::Bert(config)) => Family::Bert(Box::new(Bert::new(config))),
            other => panic!("no BERT: {other:?}"),
        },
        Which::Mixtral => decoder(json!({
            "model_type": "mixtral", "vocab_size": 17, "hidden_size": 12, "intermediate_size": 20,
            "num_hidden_layers": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 8,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2,
            "output_router_logits": true, "router_aux_loss_coef": 0.02, "tie_word_embeddings": false,
        })),
    };
    family.into()
}

impl Model {
    pub(crate) fn parameters(&self) -> &Parameters {
        match &self.family {
            Family::Mlp(_, parameters) => parameters,
            Family::Decoder(decoder) => decoder.parameters(),
            Family::Bert(bert) => bert.parameters(),
        }
    }

    pub(crate) fn batch(&self, engine: &Engine, number: usize) -> Batch {
        let (device, seed) = (engine.device(), number * 5 + engine.data_rank() * 11);
        match &self.family {
            Family::Mlp(..) => {
                let values = |shift: usize| -> Tensor {
                    let values: Vec<f32> =
                        (0..12).map(|i| ((i * 7 + seed + shift) % 13) as f32 / 6.0 - 1.0).collect();
                    let values = Tensor::from_slice(&values, [2, 6], device).unwrap();
                    ops::cast(&values, engine.store().dtype()).unwrap()
                };
                Batch::Pair((values(0), values(3)))
            }
            Family::Decoder(_) => Batch::Labelled(labelled(device, seed)),
            Family::Bert(_) => {
                let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + seed + i * i) % 17) as i64).collect();
                let labels: Vec<i64> =
                    ids.iter().enumerate().map(|(i, id)| if i % 3 == 0 { *id } else { -100 }).collect();
                let texts = [seed as i64 % 2, 1];
                Batch::Bert(Box::new(BertBatch {
                    ids: Tensor::from_slice(&ids, [2, 7], device).unwrap(),
                    token_types: None,
                    mask: None,
                    token_labels: Some(Tensor::from_slice(&labels, [2, 7], device).unwrap()),
                    text_labels: Some(Tensor::from_slice(&texts, [2], device).unwrap()),
                }))
            }
        }
    }
}

impl Stages for Model {
    type Batch = Batch;

    fn layers(&self) -> Vec<ferrospeed_nn::Layer> {
        match &self.family {
            Family::Mlp(model, _) => model.layers(),
            Family::Decoder(model) => model.layers(),
            Family::Bert(model) => model.layers(),
        }
    }

    fn forward_range(
        &self,
        range: std::ops::Range<usize>,
        batch: &Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        self.run(true, range, batch, carried, mode)
    }

    fn output_range(
        &self,
        range: std::ops::Range<usize>,
        batch: &Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        self.run(false, range, batch, carried, mode)
    }
}

impl Model {
    /// The loss, through all layers.
    pub(crate) fn loss(&self, batch: &Batch, mode: Mode) -> Result<Tensor, TensorError> {
        Ok(self.forward_range(0..self.layers().len(), batch, Carried::new(), mode)?.swap_remove(0))
    }

    /// Some layers of whichever model it is, to its loss or to what it says.
    pub(crate) fn run(
        &self,
        to_loss: bool,
        range: std::ops::Range<usize>,
        batch: &Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        fn of<M: Stages>(
            model: &M,
            to_loss: bool,
            range: std::ops::Range<usize>,
            batch: &M::Batch,
            carried: Carried,
            mode: Mode,
        ) -> Result<Carried, TensorError> {
            match to_loss {
                true => model.forward_range(range, batch, carried, mode),
                false => model.output_range(range, batch, carried, mode),
            }
        }
        self.ran.lock().unwrap().push((range.clone(), autograd::is_recording()));
        match (&self.family, batch) {
            (Family::Mlp(model, _), Batch::Pair(batch)) => of(model, to_loss, range, batch, carried, mode),
            (Family::Decoder(model), Batch::Labelled(batch)) => {
                of(&**model, to_loss, range, batch, carried, mode)
            }
            (Family::Bert(model), Batch::Bert(batch)) => of(&**model, to_loss, range, batch, carried, mode),
            _ => panic!("another model's batch"),
        }
    }
}

pub(crate) fn configuration(zero: u8, precision: &str, micro_steps: usize) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": zero},
    });
    match precision {
        "fp16" => config["fp16"] = json!({"enabled": true, "initial_scale_power": 8}),
        "bf16" => config["bf16"] = json!({"enabled": true}),
        _ => {}
    }
    config
}

/// Losses and norms of steps, then all weights: of a rank of a pipeline, or of a rank that holds everything.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) losses: Vec<f32>,
    pub(crate) norms: Vec<f32>,
    pub(crate) evaluated: f32,
    pub(crate) weights: Vec<f32>,
}

pub(crate) fn start(world: World, value: &Value, model: &Model, stages: usize) -> Engine {
    let data = world.size() / stages;
    let setup = Setup::new(config(value, data), world, device(1));
    let parameters = model.parameters();
    let stages = stages.try_into().unwrap();
    initialize_pipeline(&setup, stages, model, parameters, Options::default()).unwrap()
}

pub(crate) fn train(
    engine: &mut Engine,
    model: &Model,
    steps: std::ops::Range<usize>,
) -> (Vec<f32>, Vec<f32>) {
    let micro_batches = engine.gradient_accumulation_steps() as usize;
    let in_stages = engine.stage().1 > 1;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in steps {
        let report = if in_stages {
            let batches: Vec<Batch> =
                (0..micro_batches).map(|m| model.batch(engine, step * micro_batches + m)).collect();
            let mut batches = batches.into_iter();
            let next = |_| Ok::<_, EngineError>(batches.next().unwrap());
            let (loss, report) = engine.train_batch(model, next).unwrap();
            losses.push(loss);
            report
        } else {
            let (mut sum, mut last) = (0.0, StepReport::Accumulating);
            for micro in 0..micro_batches {
                let batch = model.batch(engine, step * micro_batches + micro);
                let loss = engine.forward(|mode| model.loss(&batch, mode)).unwrap();
                sum += loss.item().unwrap();
                engine.backward(&loss).unwrap();
                last = engine.step().unwrap();
            }
            let mut mean = [sum / micro_batches as f32];
            engine.world().group().all_reduce(&mut mean, ReduceOp::Avg).unwrap();
            losses.push(mean[0]);
            last
        };
        match report {
            StepReport::Applied { grad_norm } => norms.push(grad_norm as f32),
            other => panic!("step {step}: {other:?}"),
        }
    }
    (losses, norms)
}

pub(crate) fn weights(engine: &Engine, model: &Model) -> Vec<f32> {
    let all = model.parameters().as_slice().iter();
    all.flat_map(|param| engine.weight_as_read(param).unwrap()).collect()
}

pub(crate) fn outcome(engine: &mut Engine, model: &Model) -> Outcome {
    let (losses, norms) = train(engine, model, 0..3);
    let evaluated = if engine.stage().1 > 1 {
        let batch = model.batch(engine, 99);
        let mut batch = Some(batch);
        engine.eval_batch(model, 1, |_| Ok::<_, EngineError>(batch.take().unwrap())).unwrap()
    } else {
        let batch = model.batch(engine, 99);
        engine.eval();
        let loss = engine.forward(|mode| model.loss(&batch, mode)).unwrap();
        engine.train();
        let mut mean = [loss.item().unwrap()];
        engine.world().group().all_reduce(&mut mean, ReduceOp::Avg).unwrap();
        mean[0]
    };
    Outcome { losses, norms, evaluated, weights: weights(engine, model) }
}

pub(crate) fn whole(which: Which, data: usize, value: &Arc<Value>) -> Outcome {
    let value = value.clone();
    let mut outcomes = on_ranks(data, move |world| {
        let model = build(which);
        let setup = Setup::new(config(&value, world.size()), world, device(1));
        let mut engine = initialize_model(&setup, model.parameters(), Options::default()).unwrap();
        outcome(&mut engine, &model)
    });
    outcomes.swap_remove(0)
}

pub(crate) fn in_stages(which: Which, stages: usize, data: usize, value: &Arc<Value>) -> Vec<Outcome> {
    let value = value.clone();
    on_ranks(stages * data, move |world| {
        let model = build(which);
        let mut engine = start(world, &value, &model, stages);
        outcome(&mut engine, &model)
    })
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
