//! `ferrospeed bench gpu`: training steps and text generation on a GPU, at sizes that others publish.
//!
//! `benches/peers/gpu.py` runs the same models in PyTorch, eager and compiled. A step is the engine's `forward`,
//! `backward` and `step` with AdamW, clipping, bf16 weights and f32 master weights.

use std::num::NonZeroU64;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_command::{DeviceChoice, Failure, terminal};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::{ModelError, Tokens};
use ferrospeed_tensor::autograd::OnHost;
use ferrospeed_tensor::store::{ParamSource, PlainStore};
use ferrospeed_tensor::{Category, DType, Device, Param, Tensor, TensorError};
use serde_json::{Value, json};

use cases::{CASES, Case};

mod attention;
mod cases;
mod copies;

/// What the reference GPU reaches in a large bf16 product of random numbers; utilisation is stated against it.
const REFERENCE_TFLOPS: f64 = 790.0;

/// Where the inputs of blocks wait that are computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Waiting {
    Device,
    Host,
}

/// What waits in the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Offloaded {
    /// The f32 weights and optimizer states, which the host then updates
    Optimizer,
    /// And the weights that kernels read (stage 3)
    All,
}

#[derive(Debug, Args)]
pub(super) struct GpuBenchArgs {
    /// Models to train: 124m, 350m and 1.3b are GPT-2's shapes; llama-350m, llama-1.1b, llama-3b, llama-8b, llama-16b, qwen2-1.5b, mistral-1.1b,
    /// neox-1.4b; mixtral-8x2 and mixtral-64x8 have so many experts, of which so many see a token
    #[arg(long, value_delimiter = ',', default_values = ["124m", "350m", "1.3b"])]
    model: Vec<String>,
    /// ZeRO stages to train with
    #[arg(long, value_delimiter = ',', default_values_t = [0u8], value_parser = clap::value_parser!(u8).range(0..=3))]
    stage: Vec<u8>,
    /// Tokens of a sequence, instead of each model's own; several are measured one after another
    #[arg(long, value_name = "COUNT", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(64..))]
    tokens: Vec<u32>,
    /// Sequences of a step, instead of each model's own
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Compute the blocks again in backward instead of keeping what they computed; their inputs wait in this memory
    #[arg(long, value_name = "MEMORY", num_args = 0..=1, default_missing_value = "device")]
    checkpointing: Option<Waiting>,
    /// Keep this in the host's memory
    #[arg(long, value_name = "STATE")]
    offload: Option<Offloaded>,
    /// With --offload, in stage 3: the share of the optimizer's state that goes to the host
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, requires = "offload")]
    ratio: f64,
    /// Steps to measure after three to warm up
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Generate this many tokens with the 124m model too; 0 leaves it out
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    generate: usize,
    /// Measure attention alone at these numbers of tokens, and nothing else
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    attention: Vec<usize>,
    /// Measure copies between host and device alone, and nothing else
    #[arg(long)]
    copies: bool,
    /// With --attention: how many last tokens a token sees
    #[arg(long, value_name = "TOKENS")]
    window: Option<usize>,
    /// The GPU
    #[arg(long, value_name = "cuda[:N]", default_value = "cuda", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// Small numbers without a pattern, quicker than normal ones: initialising is not what is measured.
struct Scatter;

impl ParamSource for Scatter {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<(), TensorError> {
        let is_norm = ["ln_", "norm"].iter().any(|part| param.name().contains(part))
            && param.name().ends_with("weight");
        for (value, index) in out.iter_mut().zip(range) {
            let hash = (index as u32).wrapping_mul(2_654_435_761) ^ 0x9E37_79B9;
            *value = if is_norm { 1.0 } else { ((hash >> 8) as f32 / 16_777_216.0 - 0.5) * 0.06 };
        }
        Ok(())
    }
}

pub(super) fn run(args: &GpuBenchArgs) -> Result<ExitCode, Failure> {
    if args.device == DeviceChoice::Cpu {
        return Err(Failure::Usage(
            "--device cpu: this measures a GPU; `bench model` measures the processor".into(),
        ));
    }
    if !args.attention.is_empty() {
        return measure_attention(args);
    }
    if args.copies {
        return measure_copies(args);
    }
    let cases = args.model.iter().map(|name| Case::of_name(name)).collect::<Result<Vec<_>, String>>();
    for case in cases.map_err(Failure::Usage)? {
        let own = [case.tokens as u32];
        let lengths = if args.tokens.is_empty() { &own[..] } else { &args.tokens };
        for (&tokens, &stage) in
            lengths.iter().flat_map(|tokens| args.stage.iter().map(move |stage| (tokens, stage)))
        {
            // A device of its own gives back everything that the last case held.
            let device = args.device.open()?;
            let batch = args.batch.map_or(case.batch, |batch| batch as usize);
            let (checkpointing, offload) =
                (args.checkpointing, args.offload.map(|state| (state, args.ratio)));
            let run = Run { case, batch, tokens: tokens as usize, stage, checkpointing, offload };
            print(args, &run.train(args.steps, &device)?)?;
        }
    }
    if args.generate > 0 {
        let device = args.device.open()?;
        let row =
            speak(&CASES[0], args.generate, &device).map_err(|error| Failure::Run(error.to_string()))?;
        print(args, &row)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure_attention(args: &GpuBenchArgs) -> Result<ExitCode, Failure> {
    for &tokens in &args.attention {
        for shape in attention::SHAPES {
            let row = attention::measure(shape, tokens, args.window, &args.device.open()?)
                .map_err(|error| Failure::Run(error.to_string()))?;
            let name = row["case"].as_str().unwrap_or_default();
            let ms = |key: &str| row[key].as_f64().unwrap_or(0.0);
            let text = format!(
                "{name} {tokens:>7} tokens  forward {:>8.2} ms  and backward {:>8.2} ms",
                ms("forward_ms"),
                ms("both_ms")
            );
            terminal::print_output(&if args.json { row.to_string() } else { text })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn measure_copies(args: &GpuBenchArgs) -> Result<ExitCode, Failure> {
    let row = copies::measure(&args.device.open()?).map_err(|error| Failure::Run(error.to_string()))?;
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    let text = format!(
        "copies  out {:.1} GB/s  in {:.1} GB/s  both at once {:.1} GB/s each  products beside them at {:.0} % of their speed",
        number("out_gb_per_s"),
        number("in_gb_per_s"),
        number("each_way_at_once_gb_per_s"),
        100.0 * number("products_beside_copies"),
    );
    terminal::print_output(&if args.json { row.to_string() } else { text })?;
    Ok(ExitCode::SUCCESS)
}

/// One case as it is measured.
struct Run {
    case: &'static Case,
    batch: usize,
    tokens: usize,
    stage: u8,
    checkpointing: Option<Waiting>,
    /// What is in the host's memory, and how much of the optimizer's state.
    offload: Option<(Offloaded, f64)>,
}

impl Run {
    fn ids(&self, device: &Device) -> ferrospeed_tensor::Result<Tensor> {
        let next = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 7) % self.case.vocabulary as usize) as i64;
        let ids: Vec<i64> = (0..self.batch * self.tokens).map(next).collect();
        Tensor::from_slice(&ids, [self.batch, self.tokens], device)
    }

    fn train(&self, steps: u64, device: &Device) -> Result<Value, Failure> {
        let failed = |error: &dyn std::fmt::Display| Failure::Run(error.to_string());
        let Run { case, batch, tokens, stage, checkpointing, offload } = *self;
        let mut zero = json!({"stage": stage});
        if let Some((_, ratio)) = offload {
            zero["offload_optimizer"] = json!({"device": "cpu", "pin_memory": true, "ratio": ratio});
        }
        if matches!(offload, Some((Offloaded::All, _))) {
            zero["offload_param"] = json!({"device": "cpu", "pin_memory": true});
        }
        let config = json!({
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": true},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        });
        let read = Config::from_value("bench", &config).map_err(|error| failed(&error))?;
        let (config, _) =
            read.resolve(NonZeroU64::MIN, &AutoValues::new()).map_err(|error| failed(&error))?;
        let mut model = case.decoder(tokens).map_err(|error| failed(&error))?;
        match checkpointing {
            None => {}
            Some(Waiting::Device) => model.set_activation_checkpointing(true),
            Some(Waiting::Host) => model.checkpoint_activations_on(Arc::new(OnHost::default())),
        }
        let setup = Setup::new(config, World::solo(), device.clone());
        let options = Options { source: Some(&Scatter), ..Options::default() };
        let mut engine =
            initialize_model(&setup, model.parameters(), options).map_err(|error| failed(&error))?;
        let ids = self.ids(device).map_err(|error| failed(&error))?;
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
            "batch": batch,
            "tokens": tokens,
            "checkpointing": checkpointing.map(|memory| format!("{memory:?}").to_lowercase()),
            "offload": offload.map(|(state, _)| format!("{state:?}").to_lowercase()),
            "tokens_per_s": (batch * tokens) as f64 / median_s,
            "median_ms": median_s * 1e3,
            "best_ms": seconds[0] * 1e3,
            "first_ms": first_s * 1e3,
            "utilisation": case.step_flops(batch, tokens) / median_s / (REFERENCE_TFLOPS * 1e12),
            "peak_bytes": usage.peak_total(),
            "peak_bytes_by_category": by_category,
        }))
    }
}

fn speak(case: &Case, tokens: usize, device: &Device) -> Result<Value, ModelError> {
    let model = case.decoder(case.tokens)?;
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
    let mut text = format!("{name:<18} {:>9.0} tokens/s", number("tokens_per_s"));
    if row["stage"].is_number() {
        text.push_str(&format!(
            "  {} × {}  ZeRO-{}  {:>7.2} ms  {:>4.1} % of {REFERENCE_TFLOPS} TFLOP/s  {:>6.2} GB  first step {:.0} ms",
            row["batch"],
            row["tokens"],
            row["stage"],
            number("median_ms"),
            100.0 * number("utilisation"),
            number("peak_bytes") / 1e9,
            number("first_ms"),
        ));
    }
    terminal::print_output(&text)
}
