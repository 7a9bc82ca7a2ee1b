//! What `ferrospeed plan` says a rank needs, against what the allocator counts while ranks train.

use std::sync::Arc;

use super::common::{config, on_ranks};
use ferrospeed_comm::layout::ExpertOrder;
use ferrospeed_comm::topology::{DATA, MODEL, PIPE};
use ferrospeed_comm::{Mesh, ProcessTopology, SEQUENCE, World};
use ferrospeed_engine::{
    EngineError, Options, PlacedOn, Setup, initialize_model, initialize_pipeline, placement,
};
use ferrospeed_models::decoder::Spread;
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::tensor_parallel::{Between, Slices};
use ferrospeed_nn::{Mode, SequenceMethod, SequenceParallel};
use ferrospeed_placement::DeviceKind;
use ferrospeed_tensor::{Category, Tensor};
use ferrospeed_tune::model::{Model, from_hugging_face};
use ferrospeed_tune::plan::{Operands, Plan, Processor, Purpose, Request, Tier, plan};
use ferrospeed_tune::stages::{divide, plan_in_stages};
use serde_json::{Value, json};

/// The most that a plan may be off.
const TOLERANCE: f64 = 0.05;
const BATCH: usize = 2;

/// What is trained, and on which ranks.
#[derive(Clone)]
struct Case {
    model: Value,
    config: Value,
    tokens: usize,
    data: usize,
    tensor: usize,
    sequence: usize,
    expert: usize,
    pipe: usize,
    checkpointing: bool,
}

fn gpt2(layers: u64, width: u64, vocab: u64, tokens: usize) -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": vocab, "n_embd": width, "n_layer": layers, "n_head": width / 32,
        "n_positions": tokens, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    })
}

fn llama(layers: u64, width: u64, vocab: u64, tokens: usize) -> Value {
    json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "intermediate_size": 3 * width,
        "num_hidden_layers": layers, "num_attention_heads": width / 32, "num_key_value_heads": width / 64,
        "max_position_embeddings": tokens, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    })
}

fn mixtral(layers: u64, width: u64, vocab: u64, tokens: usize) -> Value {
    let mut config = llama(layers, width, vocab, tokens);
    config["model_type"] = "mixtral".into();
    config["num_local_experts"] = 4.into();
    config["num_experts_per_tok"] = 2.into();
    config
}

/// Stage, precision, micro-batches of a step, and further keys of `zero_optimization`.
fn configuration(stage: u8, precision: &str, micro_batches: usize, zero: &Value) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": stage},
    });
    for (key, value) in zero.as_object().unwrap() {
        config["zero_optimization"][key] = value.clone();
    }
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    config
}

impl Case {
    fn new(model: Value, tokens: usize, config: Value, data: usize) -> Case {
        Case { model, config, tokens, data, tensor: 1, sequence: 1, expert: 1, pipe: 1, checkpointing: false }
    }

    fn planned(&self) -> Plan {
        let whole = from_hugging_face(&self.model).unwrap();
        let shape = whole.in_slices(self.tensor as u64).with_experts_over(self.expert as u64).unwrap();
        let config = config(&self.config, self.data);
        let request = Request {
            model: &Model::Transformer(shape),
            config: &config,
            data_parallel_size: (self.data * self.sequence) as u64,
            sequence_ranks: self.sequence as u64,
            sequence_length: self.tokens as u64,
            checkpoint_activations: self.checkpointing,
            mlp_chunk: None,
            keeps_attention_matrix: false,
            processor: Processor::Cpu,
            operands: Operands::of_host(
                ferrospeed_cpu::multiplies_in_tiles(),
                ferrospeed_cpu::widens_operands(),
            ),
        };
        match self.pipe {
            1 => plan(&request),
            stages => {
                let division =
                    divide(&whole, &config, stages.try_into().unwrap(), self.tokens as u64).unwrap();
                plan_in_stages(&request, &division).unwrap()
            }
        }
    }

    /// Peaks of the rank that held most, by category and together, from the second step on.
    fn measured(&self) -> ([usize; 5], usize) {
        let case = Arc::new(self.clone());
        let ranks = self.pipe * self.data * self.tensor * self.sequence;
        let all = on_ranks(ranks, move |world| case.train(world));
        all.into_iter().max_by_key(|(_, total)| *total).unwrap()
    }

    fn train(&self, world: World) -> ([usize; 5], usize) {
        let axes = [(PIPE, self.pipe), (DATA, self.data), (SEQUENCE, self.sequence), (MODEL, self.tensor)];
        let mesh = Mesh::new(world.clone(), ProcessTopology::new(axes).unwrap()).unwrap();
        let mut options = Options::default();
        if [self.pipe, self.tensor, self.sequence, self.expert].iter().any(|&ranks| ranks > 1) {
            options.spread_over(&mesh).unwrap();
        }
        let mut spread = Spread::default();
        if self.tensor > 1 {
            spread.slices = Some(Slices::over(&mesh.tensor().unwrap(), Between::AllTokens));
        }
        if self.expert > 1 {
            let groups = mesh.expert(self.expert, ExpertOrder::ExpertBeforeData).unwrap();
            spread.experts = Some((&groups.expert).into());
            options.spread_experts(&mesh, groups).unwrap();
        }
        let ModelConfig::Decoder(parsed) =
            ModelConfig::from_value(&self.model, WindowRule::default()).unwrap()
        else {
            panic!("a decoder")
        };
        let mut model = Decoder::spread(*parsed, &spread).unwrap();
        model.set_activation_checkpointing(self.checkpointing);
        let device = ferrospeed_cpu::with_threads(1);
        let setup = Setup::new(config(&self.config, self.data), world, device.clone());
        let mut engine = match self.pipe {
            1 => initialize_model(&setup, model.parameters(), options).unwrap(),
            stages => {
                let stages = stages.try_into().unwrap();
                initialize_pipeline(&setup, stages, &model, model.parameters(), options).unwrap()
            }
        };
        if self.sequence > 1 {
            let group = mesh.sequence().unwrap();
            model.set_sequence_parallel(Some(SequenceParallel::new(group, SequenceMethod::Ulysses)));
        }
        for step in 0..3 {
            if step == 1 {
                device.backend().reset_peak_memory();
            }
            let batch = || {
                let ids = (0..BATCH * self.tokens).map(|at| ((at * 7 + at * at + step * 11) % 100) as i64);
                let ids: Vec<i64> = ids.collect();
                Tensor::from_slice(&ids, [BATCH, self.tokens], &device).unwrap()
            };
            if self.pipe > 1 {
                let labelled = |_| Ok::<_, EngineError>((Tokens::new(batch()), batch()));
                engine.train_batch(&model, labelled).unwrap();
                continue;
            }
            for _ in 0..engine.gradient_accumulation_steps() {
                let ids = batch();
                let loss =
                    engine.forward(|_| model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train)).unwrap();
                engine.backward(&loss).unwrap();
                engine.step().unwrap();
            }
        }
        let usage = device.memory_usage();
        (Category::ALL.map(|category| usage.peak(category)), usage.peak_total())
    }
}

fn rows(plan: &Plan, purpose: Purpose) -> u64 {
    plan.rows
        .iter()
        .filter(|row| row.purpose == purpose && row.tier == Tier::Device)
        .map(|row| row.bytes)
        .sum()
}

/// What is wrong with the plan of a case, if anything.
fn off(name: &str, case: &Case) -> Option<String> {
    let (planned, (by_category, total)) = (case.planned(), case.measured());
    // Tiles of states that are on a disk lie in memory of their own, which no device counts.
    let tiles: u64 =
        planned.rows.iter().filter(|row| row.why.contains("tiles of")).map(|row| row.bytes).sum();
    let planned_total = planned.total(Tier::Device) - tiles;
    let ratio = planned_total as f64 / total as f64;
    let purposes = [
        Purpose::Parameters,
        Purpose::Gradients,
        Purpose::OptimizerStates,
        Purpose::Activations,
        Purpose::CommunicationBuffers,
    ];
    let compared = purposes
        .iter()
        .zip(by_category)
        .map(|(&purpose, measured)| format!("{purpose} {} of {measured}", rows(&planned, purpose)));
    let text = format!(
        "{name}: planned {planned_total} of {total} ({ratio:.3}): {}",
        compared.collect::<Vec<_>>().join(", ")
    );
    println!("{text}");
    ((ratio - 1.0).abs() > TOLERANCE).then_some(text)
}

/// Limits of stage 3 and of buckets that are less than a small model.
fn few() -> Value {
    json!({
        "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 300_000,
        "stage3_prefetch_bucket_size": 100_000, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 100_000,
    })
}

/// Names and cases of models × stages × precisions, with options that take turns.
fn stages() -> Vec<(String, Case)> {
    let mut cases = Vec::new();
    for (kind, model, tokens) in [
        ("gpt2", gpt2(4, 128, 1000, 64), 64),
        ("llama", llama(3, 128, 1000, 64), 64),
        ("wide vocabulary", gpt2(2, 64, 8000, 64), 64),
        ("long", gpt2(3, 96, 600, 256), 256),
    ] {
        for precision in ["fp32", "bf16"] {
            for (data, stage) in [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)] {
                let turn = cases.len();
                let (micro_batches, checkpointing) = (1 + turn % 2, turn / 2 % 2 == 1);
                let limits = if stage > 1 && turn % 3 == 0 { few() } else { json!({}) };
                let config = configuration(stage, precision, micro_batches, &limits);
                let case = Case { checkpointing, ..Case::new(model.clone(), tokens, config, data) };
                let name = format!(
                    "{kind}, {precision}, stage {stage}, {data} ranks, {micro_batches} micro-batches, checkpointing {checkpointing}, {limits}"
                );
                cases.push((name, case));
            }
        }
    }
    cases
}

fn assert_all_planned(cases: &[(String, Case)]) {
    let wrong: Vec<String> = cases.iter().filter_map(|(name, case)| off(name, case)).collect();
    assert!(wrong.is_empty(), "{} of {} plans are off:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn measured_peaks_of_all_stages_are_within_five_percent_of_the_plan() {
    assert_all_planned(&stages());
}

#[test]
fn measured_peaks_of_meshes_are_within_five_percent_of_the_plan() {
    let mut cases = Vec::new();
    for stage in [0, 1, 3] {
        for (data, precision) in [(1, "fp32"), (2, "bf16")] {
            let config = || configuration(stage, precision, 1, &json!({}));
            let add =
                |name: &str, case: Case| (format!("{name}, {precision}, stage {stage}, {data} ranks"), case);
            let sliced = Case::new(llama(6, 128, 1000, 64), 64, config(), data);
            cases.push(add("2 slices", Case { tensor: 2, ..sliced }));
            let long = Case::new(llama(4, 128, 1000, 128), 128, config(), data);
            cases.push(add("2 parts of a sequence", Case { sequence: 2, ..long }));
            let experts = Case::new(mixtral(2, 128, 600, 64), 64, config(), 2 * data);
            cases.push(add("experts", experts.clone()));
            // Every expert gets every token: a plan takes routers to be balanced.
            let mut spread = Case { expert: 2, ..experts };
            spread.model["num_experts_per_tok"] = 4.into();
            cases.push(add("2 parts of experts", spread));
        }
    }
    assert_all_planned(&cases);
}

#[test]
fn measured_peaks_with_offload_and_second_copies_are_within_five_percent_of_the_plan() {
    let disk = tempfile::tempdir().unwrap();
    let nvme = json!({"device": "nvme", "nvme_path": disk.path()});
    let model = || gpt2(4, 128, 1000, 64);
    let case = |stage, precision, data, zero: Value| {
        Case::new(model(), 64, configuration(stage, precision, 1, &zero), data)
    };
    let near = json!({"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0});
    let mut cases = vec![
        ("a second copy".to_owned(), case(3, "bf16", 4, near.clone())),
        ("a second copy in f32".to_owned(), case(3, "fp32", 4, near)),
        ("shards".to_owned(), case(3, "bf16", 4, json!({"mics_shard_size": 2}))),
    ];
    for precision in ["fp32", "bf16", "fp16"] {
        let states = json!({"offload_optimizer": nvme});
        cases.push((format!("states on a disk, {precision}"), case(3, precision, 2, states)));
        let states = json!({"offload_optimizer": {"device": "cpu"}});
        for stage in [1, 2, 3] {
            let name = format!("states on the host, {precision}, stage {stage}");
            cases.push((name, case(stage, precision, 2, states.clone())));
        }
    }
    let all = json!({"offload_optimizer": nvme, "offload_param": nvme});
    cases.push(("all on a disk".to_owned(), case(3, "bf16", 2, all)));
    assert_all_planned(&cases);
}

#[test]
fn measured_peaks_of_stages_are_within_five_percent_of_the_plan() {
    let mut cases = Vec::new();
    for schedule in ["1f1b", "interleaved:2", "zb-h1", "zb-v"] {
        for (pipe, data, stage, precision) in
            [(2, 1, 0, "fp32"), (2, 2, 1, "bf16"), (4, 1, 0, "bf16"), (4, 2, 1, "fp32")]
        {
            for (kind, model, tokens) in
                [("gpt2", gpt2(8, 128, 1000, 64), 64), ("llama", llama(8, 128, 1000, 64), 64)]
            {
                let mut config = configuration(stage, precision, 8, &json!({}));
                config["pipeline"] = json!({"schedule": schedule});
                let case = Case { pipe, ..Case::new(model, tokens, config, data) };
                let name = format!("{kind}, {schedule}, {precision}, ZeRO {stage}, pp {pipe}, dp {data}");
                cases.push((name, case));
            }
        }
    }
    let with = |more: Value, case: Case| {
        let mut case = case;
        case.config["pipeline"] = more;
        case
    };
    let case = |model: Value, tokens| Case {
        pipe: 2,
        ..Case::new(model, tokens, configuration(0, "bf16", 4, &json!({})), 1)
    };
    let wide = || case(gpt2(4, 64, 8000, 64), 64);
    let long = || case(llama(4, 96, 600, 256), 256);
    cases.push(("a wide vocabulary".to_owned(), with(json!({"partition": "uniform"}), wide())));
    cases.push(("long sequences".to_owned(), with(json!({}), long())));
    cases.push((
        "blocks computed again".to_owned(),
        Case { checkpointing: true, ..with(json!({"schedule": "zb-h1"}), long()) },
    ));
    cases.push((
        "layers computed again".to_owned(),
        with(json!({"activation_checkpoint_interval": 2}), long()),
    ));
    cases.push((
        "slices".to_owned(),
        Case { tensor: 2, ..with(json!({}), case(llama(6, 128, 1000, 64), 64)) },
    ));
    cases.push(("parts of a sequence".to_owned(), Case { sequence: 2, ..with(json!({}), long()) }));
    cases.push(("one micro-batch".to_owned(), {
        let config = configuration(0, "bf16", 1, &json!({}));
        Case { pipe: 2, ..Case::new(gpt2(4, 128, 1000, 64), 64, config, 1) }
    }));
    assert_all_planned(&cases);
}

#[test]
fn what_is_placed_before_a_run_is_what_the_run_holds() {
    let zero = |more: Value| configuration(more["stage"].as_u64().unwrap() as u8, "bf16", 1, &more);
    for (config_of, model) in [
        (configuration(0, "fp32", 1, &json!({})), gpt2(2, 64, 96, 32)),
        (configuration(1, "bf16", 2, &json!({"overlap_comm": true})), gpt2(2, 64, 96, 32)),
        (configuration(2, "fp32", 2, &json!({"reduce_bucket_size": 4000})), llama(2, 64, 96, 32)),
        (zero(json!({"stage": 2, "reduce_each_micro_batch": true})), mixtral(2, 64, 96, 32)),
        (zero(json!({"stage": 3, "stage3_param_persistence_threshold": 100})), mixtral(2, 64, 96, 32)),
        (zero(json!({"stage": 3, "mics_shard_size": 2})), llama(2, 64, 96, 32)),
    ] {
        for ranks in [1, 2, 4] {
            if ranks == 1 && config_of["zero_optimization"]["mics_shard_size"] == 2 {
                continue;
            }
            let (config_of, model) = (config_of.clone(), model.clone());
            on_ranks(ranks, move |world| {
                let parsed = ModelConfig::from_value(&model, WindowRule::default()).unwrap();
                let (config, parameters) = (config(&config_of, ranks), parsed.parameters());
                let on = PlacedOn { ranks, rank: world.rank(), on_one_host: true, device: DeviceKind::Host };
                let placed = placement(&config, &parameters, false, &on).unwrap();
                let setup = Setup::new(config, world, ferrospeed_cpu::with_threads(1));
                let engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
                let held = engine.store().placement();
                assert_eq!(placed.to_string(), held.to_string(), "{ranks} ranks, {config_of}");
                assert_eq!(placed.buckets, held.buckets, "{ranks} ranks, {config_of}");
            });
        }
    }
}
