//! `ferrospeed bench gpu`: training steps and text generation on a GPU, at sizes that others publish.
//!
//! `benches/peers/gpu.py` runs the same models in PyTorch, eager and compiled. A step is the engine's `forward`,
//! `backward` and `step` with AdamW, clipping, bf16 weights and f32 master weights, on sequences of 1,024 tokens.

use std::num::NonZeroU64;
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelConfig, ModelError, Tokens, WindowRule};
use ferrospeed_tensor::store::{ParamSource, PlainStore};
use ferrospeed_tensor::{Category, DType, Device, Param, Tensor, TensorError};
use serde_json::{Value, json};

use super::bench_model::step_flops;
use super::device::DeviceChoice;
use crate::failure::Failure;
use crate::terminal;

/// What the reference GPU reaches in a large bf16 product of random numbers; utilisation is stated against it.
const REFERENCE_TFLOPS: f64 = 790.0;
const VOCABULARY: u64 = 50_304;
const TOKENS: usize = 1024;

#[derive(Debug, Args)]
pub(super) struct GpuBenchArgs {
    /// Models to train: 124m, 350m, 1.3b
    #[arg(long, value_delimiter = ',', default_values = ["124m", "350m", "1.3b"])]
    model: Vec<String>,
    /// ZeRO stages to train with
    #[arg(long, value_delimiter = ',', default_values_t = [0u8], value_parser = clap::value_parser!(u8).range(0..=3))]
    stage: Vec<u8>,
    /// Steps to measure after three to warm up
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Generate this many tokens with the 124m model too; 0 leaves it out
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    generate: usize,
    /// The GPU
    #[arg(long, value_name = "cuda[:N]", default_value = "cuda", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// A model of GPT-2's shape.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    layers: u64,
    width: u64,
    heads: u64,
    batch: usize,
}

const CASES: [Case; 3] = [
    Case { name: "124m", layers: 12, width: 768, heads: 12, batch: 32 },
    Case { name: "350m", layers: 24, width: 1024, heads: 16, batch: 16 },
    Case { name: "1.3b", layers: 24, width: 2048, heads: 16, batch: 8 },
];

impl Case {
    fn decoder(&self) -> Result<Decoder, ModelError> {
        let config = Preset::Gpt2.config(&PresetSizes {
            layers: Some(self.layers),
            width: Some(self.width),
            heads: Some(self.heads),
            vocabulary: VOCABULARY,
            sequence: TOKENS as u64,
            dropout: 0.0,
        });
        match ModelConfig::from_value(&config, WindowRule::default())? {
            ModelConfig::Decoder(config) => Ok(Decoder::new(*config)),
            ModelConfig::Bert(_) => unreachable!("a preset is a decoder"),
        }
    }

    fn step_flops(&self) -> f64 {
        step_flops([self.layers, self.width, VOCABULARY], self.batch, TOKENS)
    }
}

/// Small numbers without a pattern, quicker than normal ones: initialising is not what is measured.
struct Scatter;

impl ParamSource for Scatter {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<(), TensorError> {
        let is_norm = param.name().contains("ln_") && param.name().ends_with("weight");
        for (value, index) in out.iter_mut().zip(range) {
            let hash = (index as u32).wrapping_mul(2_654_435_761) ^ 0x9E37_79B9;
            *value = if is_norm { 1.0 } else { ((hash >> 8) as f32 / 16_777_216.0 - 0.5) * 0.06 };
        }
        Ok(())
    }
}

pub(super) fn run(args: &GpuBenchArgs) -> Result<ExitCode, Failure> {
    let mut wanted = Vec::new();
    for name in &args.model {
        let Some(case) = CASES.iter().find(|case| case.name == name) else {
            return Err(Failure::Usage(format!(
                "--model {name}: there are {}",
                CASES.map(|case| case.name).join(", ")
            )));
        };
        for &stage in &args.stage {
            wanted.push((case, stage));
        }
    }
    for (case, stage) in wanted {
        // A device of its own gives back everything that the last case held.
        let device = args.device.open()?;
        let row = train(case, stage, args.steps, &device)?;
        print(args, &row)?;
    }
    if args.generate > 0 {
        let device = args.device.open()?;
        let row =
            speak(&CASES[0], args.generate, &device).map_err(|error| Failure::Run(error.to_string()))?;
        print(args, &row)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn ids(batch: usize, device: &Device) -> ferrospeed_tensor::Result<Tensor> {
    let next = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 7) % VOCABULARY as usize) as i64;
    let ids: Vec<i64> = (0..batch * TOKENS).map(next).collect();
    Tensor::from_slice(&ids, [batch, TOKENS], device)
}

fn train(case: &Case, stage: u8, steps: u64, device: &Device) -> Result<Value, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Run(error.to_string());
    let config = json!({
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": true},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    });
    let read = Config::from_value("bench", &config).map_err(|error| failed(&error))?;
    let (config, _) = read.resolve(NonZeroU64::MIN, &AutoValues::new()).map_err(|error| failed(&error))?;
    let model = case.decoder().map_err(|error| failed(&error))?;
    let setup = Setup::new(config, World::solo(), device.clone());
    let options = Options { source: Some(&Scatter), ..Options::default() };
    let mut engine = initialize_model(&setup, model.parameters(), options).map_err(|error| failed(&error))?;
    let ids = ids(case.batch, device).map_err(|error| failed(&error))?;
    let step = |engine: &mut Engine| -> Result<f64, Failure> {
        let began = Instant::now();
        let loss = engine
            .forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode))
            .map_err(|error: ModelError| failed(&error))?;
        engine.backward(&loss).map_err(|error| failed(&error))?;
        engine.step().map_err(|error| failed(&error))?;
        device.backend().synchronize().map_err(|error| failed(&error))?;
        Ok(began.elapsed().as_secs_f64())
    };
    let first_s = step(&mut engine)?;
    for _ in 0..2 {
        step(&mut engine)?;
    }
    device.backend().reset_peak_memory();
    let mut seconds = (0..steps).map(|_| step(&mut engine)).collect::<Result<Vec<f64>, Failure>>()?;
    seconds.sort_by(f64::total_cmp);
    let median_s = seconds[seconds.len() / 2];
    let usage = device.memory_usage();
    let by_category: serde_json::Map<String, Value> = Category::ALL
        .iter()
        .map(|&category| (category.name().to_owned(), usage.peak(category).into()))
        .collect();
    Ok(json!({
        "case": format!("train {}", case.name),
        "stage": stage,
        "tokens_per_s": (case.batch * TOKENS) as f64 / median_s,
        "median_ms": median_s * 1e3,
        "best_ms": seconds[0] * 1e3,
        "first_ms": first_s * 1e3,
        "utilisation": case.step_flops() / median_s / (REFERENCE_TFLOPS * 1e12),
        "peak_bytes": usage.peak_total(),
        "peak_bytes_by_category": by_category,
    }))
}

fn speak(case: &Case, tokens: usize, device: &Device) -> Result<Value, ModelError> {
    let model = case.decoder()?;
    let _store = PlainStore::attach(model.parameters().as_slice(), DType::BF16, device, &Scatter)?;
    let prompts = vec![(0..32).map(|i| i * 31 % 256).collect()];
    let options = GenerateOptions {
        max_new_tokens: tokens,
        sampling: Sampling::Greedy,
        end_tokens: Vec::new(),
        pad_token: 0,
    };
    let mut seconds = Vec::new();
    for _ in 0..4 {
        let began = Instant::now();
        generate(&model, &prompts, None, &options, device, &mut |_, _| {})?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    let best_s = seconds.into_iter().skip(1).fold(f64::INFINITY, f64::min);
    Ok(json!({
        "case": format!("generate {}", case.name),
        "tokens_per_s": tokens as f64 / best_s,
        "best_ms": best_s * 1e3,
    }))
}

fn print(args: &GpuBenchArgs, row: &Value) -> Result<(), Failure> {
    if args.json {
        return terminal::print_output(&row.to_string());
    }
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    let name = row["case"].as_str().unwrap_or_default();
    let mut text = format!("{name:<14} {:>9.0} tokens/s", number("tokens_per_s"));
    if row["stage"].is_number() {
        text.push_str(&format!(
            "  ZeRO-{}  {:>7.2} ms  {:>4.1} % of {REFERENCE_TFLOPS} TFLOP/s  {:>6.2} GB  first step {:.0} ms",
            row["stage"],
            number("median_ms"),
            100.0 * number("utilisation"),
            number("peak_bytes") / 1e9,
            number("first_ms"),
        ));
    }
    terminal::print_output(&text)
}
