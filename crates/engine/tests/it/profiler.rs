//! The `flops_profiler` section: which step is counted, who reports it, and where.

use std::path::Path;

use super::common::{config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{
    Engine, EngineError, ModelProfile, Options, Setup, initialize_model, initialize_pipeline,
};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::{Init, Linear, Mode, Sequential, Stages};
use ferrospeed_observe::flops::format::NumberStyle;
use ferrospeed_tensor::{Activation, DType, Tensor, TensorError, ops};
use serde_json::{Value, json};

const ROWS: usize = 4;

fn configuration(profiler: Value) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "flops_profiler": profiler,
    })
}

fn start(world: World, value: &Value) -> (Engine, Sequential) {
    let init = Init::root();
    let model = Sequential::new(&init.at("net"))
        .add(|init| Linear::new(init, 16, 32, true))
        .add(|_| Activation::GeluErf)
        .add(|init| Linear::new(init, 32, 4, true));
    let setup = Setup::new(config(value, world.size()), world, device(1));
    (initialize_model(&setup, &init.parameters(), Options::default()).unwrap(), model)
}

/// A whole step; returns the loss.
fn step(engine: &mut Engine, model: &Sequential) -> f32 {
    let x = Tensor::full([ROWS, 16], 0.5, DType::F32, engine.device()).unwrap();
    let mut last = 0.0;
    for _ in 0..engine.gradient_accumulation_steps() {
        let loss = engine.forward(|mode: Mode| ops::mean(&ops::square(&model.forward(&x, mode)?)?)).unwrap();
        last = engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
    last
}

#[test]
fn one_micro_batch_of_the_configured_step_is_reported_by_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_owned();
    let written = on_ranks(2, move |world| {
        let rank = world.rank();
        let file = place.join("reports/profile.txt");
        let (mut engine, model) = start(
            world,
            &configuration(json!({
                "enabled": true, "profile_step": 2, "recompute_fwd_factor": 1.0, "top_modules": 2,
                "output_file": file,
            })),
        );
        let mut seen = Vec::new();
        for _ in 0..4 {
            step(&mut engine, &model);
            seen.push((file.exists(), engine.model_profile().is_some()));
        }
        (rank, seen, engine.model_profile().cloned(), std::fs::read_to_string(&file).unwrap())
    });
    for (rank, seen, profile, text) in written {
        let has_profile: Vec<bool> = seen.iter().map(|(_, has_profile)| *has_profile).collect();
        assert_eq!(has_profile, [false, false, rank == 0, rank == 0], "rank {rank}");
        if rank != 0 {
            continue;
        }
        assert_eq!(seen.iter().map(|(exists, _)| *exists).collect::<Vec<_>>(), [false, false, true, true]);
        let profile = profile.unwrap();
        let macs = (ROWS * (16 * 32 + 32 * 4)) as u64;
        let flops = 2 * macs + (ROWS * 32) as u64;
        assert_eq!((profile.macs(), profile.flops(), profile.params()), (macs, flops, 676));
        assert_eq!(profile.total().backward.macs, 2 * macs, "one micro-batch, not two");
        for line in [
            "Profile Summary at step 2:",
            "world size:                                                             2       ",
            "batch size per GPU:                                                     4       ",
            "params per GPU:                                                         676     ",
            "fwd MACs per GPU:                                                       2.56 KMACs",
            "  (net): Sequential(",
        ] {
            assert!(text.lines().any(|found| found == line), "{line:?} in {text}");
        }
        assert!(text.contains("bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency: "), "{text}");
        assert!(text.contains("    (0): Linear(544 = 80.47% Params, 2.05 KMACs = 80% MACs, "), "{text}");
        assert!(text.contains(", in_features=16, out_features=32, bias=True)\n    (1): GELU("), "{text}");
    }
}

#[test]
fn profiling_changes_no_number_and_without_detail_there_is_no_tree() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile.txt");
    let losses = |profiler: Value| {
        let (mut engine, model) = start(World::solo(), &configuration(profiler));
        (0..3).map(|_| step(&mut engine, &model).to_bits()).collect::<Vec<_>>()
    };
    let profiled = json!({
        "enabled": true, "profile_step": 0, "detailed": false, "module_depth": 1, "output_file": file,
    });
    assert_eq!(losses(profiled), losses(json!({"enabled": false})));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("Profile Summary at step 0:") && !text.contains("Detailed Profile"), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("depth ")).count(), 1, "{text}");
}

#[test]
fn a_report_that_cannot_be_written_does_not_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    std::fs::write(&taken, "a file, not a folder").unwrap();
    let file = taken.join("profile.txt");
    let profiler = json!({"enabled": true, "profile_step": 0, "output_file": file});
    let (mut engine, model) = start(World::solo(), &configuration(profiler));
    step(&mut engine, &model);
    assert!(engine.model_profile().is_some());
    assert_eq!(engine.global_steps(), 1);
}

#[test]
fn evaluations_are_not_profiled() {
    let profiler = json!({"enabled": true, "profile_step": 0, "output_file": "/dev/null"});
    let (mut engine, model) = start(World::solo(), &configuration(profiler));
    let x = Tensor::full([3 * ROWS, 16], 0.5, DType::F32, engine.device()).unwrap();
    engine.eval();
    engine.forward(|mode: Mode| model.forward(&x, mode)).unwrap();
    engine.train();
    step(&mut engine, &model);
    assert_eq!(engine.model_profile().unwrap().macs(), (ROWS * (16 * 32 + 32 * 4)) as u64);
}

/// Each op's operands and results count once, in the pass that reads and writes them.
#[test]
fn bytes_are_those_of_operands_and_results() {
    on_ranks(1, |world| {
        let (mut engine, model) = start(world, &configuration(json!({"enabled": true, "profile_step": 0})));
        step(&mut engine, &model);
        let profile = engine.model_profile().unwrap();
        let of = |path: &str| {
            let module = profile.profile().modules().iter().find(|module| &*module.path == path).unwrap();
            [module.own.forward.bytes, module.own.backward.bytes]
        };
        let bytes = |elements: usize| 4 * elements as u64;
        let (x, weight, bias, y) = (ROWS * 32, 32 * 4, 4, ROWS * 4);
        let [forward, backward] = of("net.2");
        assert_eq!(forward, bytes(x + weight + bias + y));
        // Gradients of the output, the input, the weight and the bias; the input and the weight are read once more.
        assert_eq!(backward, bytes(y + x + weight + bias + x + weight));
    });
}

fn llama(tied: bool) -> Decoder {
    let config = json!({
        "model_type": "llama", "vocab_size": 17, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 6,
        "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 8, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
    });
    match ModelConfig::from_value(&config, WindowRule::default()) {
        Ok(ModelConfig::Decoder(config)) => Decoder::new(*config),
        other => panic!("no decoder: {other:?}"),
    }
}

fn tokens(engine: &Engine) -> (Tokens, Tensor) {
    let ids = Tensor::from_slice(&[3i64; ROWS * 7], [ROWS, 7], engine.device()).unwrap();
    (Tokens::new(ids.clone()), ids)
}

/// What a report says behind some words.
fn said(text: &str, what: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(what));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or_else(|| panic!("no {what} in\n{text}"))
}

/// What one rank that has the whole model counts.
fn counted_whole(folder: &Path, tied: bool) -> ModelProfile {
    let value = configuration(profiler(&folder.join("whole.txt")));
    let mut profiles = on_ranks(1, move |world| {
        let model = llama(tied);
        let setup = Setup::new(config(&value, 1), world, device(1));
        let mut engine = initialize_model(&setup, model.parameters(), Options::default()).unwrap();
        for _ in 0..4 {
            let (batch, layers) = (tokens(&engine), 0..model.layers().len());
            let whole =
                |mode| Ok::<_, TensorError>(model.forward_range(layers, &batch, vec![], mode)?.remove(0));
            let loss = engine.forward(whole).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        engine.model_profile().unwrap().clone()
    });
    profiles.remove(0)
}

fn profiler(file: &Path) -> Value {
    json!({"enabled": true, "profile_step": 1, "output_file": file})
}

/// What the ranks of two stages count, two each.
fn counted_in_stages(value: Value, tied: bool) -> Vec<Option<ModelProfile>> {
    on_ranks(4, move |world| {
        let model = llama(tied);
        let setup = Setup::new(config(&value, 2), world, device(1));
        let stages = 2.try_into().unwrap();
        let mut engine =
            initialize_pipeline(&setup, stages, &model, model.parameters(), Options::default()).unwrap();
        for _ in 0..3 {
            let batches = [tokens(&engine), tokens(&engine)];
            let mut batches = batches.into_iter();
            let next = |_| Ok::<_, EngineError>(batches.next().unwrap());
            engine.train_batch(&model, next).unwrap();
        }
        engine.model_profile().cloned()
    })
}

#[test]
fn stages_count_their_own_modules_and_rank_0_the_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let wholes = [false, true].map(|tied| counted_whole(folder.path(), tied));
    let cases = [
        ("1f1b", 0, false),
        ("zb-h1", 0, false),
        ("interleaved:2", 0, false),
        ("1f1b", 1, false),
        ("1f1b", 0, true),
    ];
    for (schedule, recomputes, tied) in cases {
        let whole = &wholes[usize::from(tied)];
        let file = folder.path().join(format!("{schedule}-{recomputes}-{tied}.txt"));
        let mut value = configuration(profiler(&file));
        value["pipeline"] = json!({"schedule": schedule, "activation_checkpoint_interval": recomputes});
        let stages = counted_in_stages(value, tied);
        // The stages that work on rank 0's data: ranks of a stage are neighbours.
        let has_profile: Vec<bool> = stages.iter().map(Option::is_some).collect();
        assert_eq!(has_profile, [true, false, true, false], "{schedule}");
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(said(&text, "params:"), whole.params(), "what is tied counts once: {text}");
        assert_eq!(said(&text, "fwd MACs:"), whole.macs(), "{schedule}");
        assert_eq!(said(&text, "fwd flops:"), whole.flops(), "{schedule}");
        assert_eq!(said(&text, "bwd flops:"), whole.total().backward.flops, "{schedule}");
        // Each stage's part tells the whole model's sums too, and not its own under their name.
        let style = NumberStyle::default();
        for (what, count) in [
            ("params of model, all stages:", style.params(whole.params() as f64)),
            ("fwd flops of model, all stages:", style.number(whole.flops() as f64)),
        ] {
            let told: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix(what)).map(str::trim).collect();
            assert_eq!(told, [&count, &count], "{what} {text}");
        }
        // Attention's backward computes its scores again, whatever is checkpointed.
        let again =
            "flops of what forward did not keep (attention's scores, activations, checkpointed layers):";
        let again = said(&text, again) - whole.total().recomputation.flops;
        assert_eq!(again > 0, recomputes > 0, "{schedule}: {again}");
        let own = [0, 2].map(|rank: usize| stages[rank].as_ref().unwrap());
        assert_eq!(own[0].flops() + own[1].flops(), whole.flops(), "{schedule}");
        let [first, second] = text.split("\nstage 1 of 2\n").collect::<Vec<_>>()[..] else {
            panic!("{text}")
        };
        assert!(first.contains("\nstage 0 of 2\n") && first.contains("embed_tokens"), "{first}");
        assert!(second.contains("lm_head") && (tied || !second.contains("embed_tokens")), "{second}");
    }
}
