//! `ferrospeed bench model`: whole training steps, and text generation, beside the peak of this machine's products.
//!
//! Every case runs in a process of its own, so that its peak memory is its own. A step is what a user's step is:
//! `forward`, `backward` and `step` of the engine with AdamW and clipping. What the time goes into is found by running
//! the step's parts alone, at the same sizes.
//! `benches/peers/run-model.sh` runs the same cases in PyTorch and prints the ratios; `benches/peers/moe.py --cpu` those with experts,
//! and a dense model of the same active size.

use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelError, Tokens};
use ferrospeed_tensor::Device;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use serde_json::{Value, json};

use super::load;
use super::measure::{Precision, decoder, ids, peak_rss_bytes};
use super::parts::{gemm_peak_flops_per_s, parts_of_a_step};

#[derive(Debug, Args)]
pub(super) struct ModelBenchArgs {
    /// Numbers of threads to measure with
    #[arg(long, value_delimiter = ',', default_values_t = [2])]
    threads: Vec<usize>,
    /// Element types to measure
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Precision::F32, Precision::Bf16])]
    dtype: Vec<Precision>,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Steps, or texts, to measure after two to warm up
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    repeats: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Measure in this process; what the command starts for every case
    #[arg(long, hide = true)]
    here: bool,
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
enum Work {
    /// A step on `batch` sequences of `tokens`.
    Train { batch: usize, tokens: usize },
    /// `tokens` behind a prompt of `prompt`, one sequence.
    Generate { prompt: usize, tokens: usize },
    /// Loading from sharded files.
    Load,
}

/// What kind of model.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Gpt2,
    /// LLaMA's, with this inner width.
    Llama {
        inner: u64,
    },
    /// The same with so many experts of this inner width, of which a token goes to so many.
    Mixtral {
        inner: u64,
        experts: u64,
        chosen: u64,
    },
}

/// One thing to measure.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    shape: Shape,
    layers: u64,
    width: u64,
    vocabulary: u64,
    work: Work,
}

const CASES: [Case; 6] = [
    Case {
        name: "train gpt2-124m 2x512",
        shape: Shape::Gpt2,
        layers: 12,
        width: 768,
        vocabulary: 50257,
        work: Work::Train { batch: 2, tokens: 512 },
    },
    Case {
        name: "train gpt2-6x512 4x256",
        shape: Shape::Gpt2,
        layers: 6,
        width: 512,
        vocabulary: 8192,
        work: Work::Train { batch: 4, tokens: 256 },
    },
    Case {
        name: "generate gpt2-124m 64 tokens",
        shape: Shape::Gpt2,
        layers: 12,
        width: 768,
        vocabulary: 50257,
        work: Work::Generate { prompt: 32, tokens: 64 },
    },
    Case {
        name: "load gpt2-536m from shards",
        shape: Shape::Gpt2,
        layers: 24,
        width: 1280,
        vocabulary: 50257,
        work: Work::Load,
    },
    Case {
        name: "train mixtral-6x512 4x256",
        shape: Shape::Mixtral { inner: 704, experts: 8, chosen: 2 },
        layers: 6,
        width: 512,
        vocabulary: 8192,
        work: Work::Train { batch: 4, tokens: 256 },
    },
    // As many active channels as two of those experts.
    Case {
        name: "train llama-6x512 4x256",
        shape: Shape::Llama { inner: 1408 },
        layers: 6,
        width: 512,
        vocabulary: 8192,
        work: Work::Train { batch: 4, tokens: 256 },
    },
];

pub(super) fn run(args: &ModelBenchArgs) -> Result<ExitCode, Failure> {
    if args.threads.contains(&0) {
        return Err(Failure::Usage("--threads 0: at least one".into()));
    }
    let cases: Vec<&Case> = CASES.iter().filter(|case| case.name.contains(&args.only)).collect();
    if cases.is_empty() {
        let names = CASES.map(|case| case.name).join(", ");
        return Err(Failure::Usage(format!("--only {}: no case is called so; there are {names}", args.only)));
    }
    for case in cases {
        for precision in &args.dtype {
            for &threads in &args.threads {
                if args.here {
                    let row = measure(case, *precision, threads, args.repeats)?;
                    terminal::print_output(&if args.json { row.to_string() } else { as_text(&row) })?;
                } else {
                    run_apart(case, *precision, threads, args)?;
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs one case in a process of its own.
fn run_apart(
    case: &Case,
    precision: Precision,
    threads: usize,
    args: &ModelBenchArgs,
) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::Run(format!("cannot start this program again: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(["bench", "model", "--here", "--only", case.name, "--dtype", precision.dtype().name()]);
    command.args(["--threads", &threads.to_string(), "--repeats", &args.repeats.to_string()]);
    if args.json {
        command.arg("--json");
    }
    match command.status().map_err(failed)? {
        status if status.success() => Ok(()),
        status => Err(Failure::Run(format!("{}: {status}", case.name))),
    }
}

fn measure(case: &Case, precision: Precision, threads: usize, repeats: u64) -> Result<Value, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Run(error.to_string());
    let device = ferrospeed_cpu::with_threads(threads);
    let peak = gemm_peak_flops_per_s(precision.dtype(), &device).map_err(|error| failed(&error))?;
    let model = case.decoder().map_err(|error| failed(&error))?;
    let mut row = match case.work {
        Work::Load => load::measure(&case.config(), || case.decoder(), precision.dtype(), &device, repeats)
            .map_err(|error| failed(&error))?,
        Work::Train { batch, tokens } => train(case, &model, precision, &device, [batch, tokens], repeats)?,
        Work::Generate { prompt, tokens } => {
            speak(&model, precision, &device, [prompt, tokens], repeats).map_err(|error| failed(&error))?
        }
    };
    row["case"] = case.name.into();
    row["dtype"] = precision.dtype().name().into();
    row["threads"] = threads.into();
    row["gemm_peak_gflops"] = (peak / 1e9).into();
    if let Some(flops) = row["flops"].as_f64() {
        let best_s = row["best_s"].as_f64().unwrap_or(f64::INFINITY);
        row["share_of_gemm_peak"] = (flops / best_s / peak).into();
    }
    Ok(row)
}

impl Case {
    fn config(&self) -> Value {
        let of_llama = |family: &str, inner: u64| {
            json!({
                "model_type": family, "vocab_size": self.vocabulary, "hidden_size": self.width,
                "intermediate_size": inner, "num_hidden_layers": self.layers,
                "num_attention_heads": self.width / 64, "num_key_value_heads": self.width / 64,
                "max_position_embeddings": 1024, "tie_word_embeddings": false,
            })
        };
        match self.shape {
            Shape::Gpt2 => Preset::Gpt2.config(&PresetSizes {
                layers: Some(self.layers),
                width: Some(self.width),
                heads: None,
                vocabulary: self.vocabulary,
                sequence: 1024,
                dropout: 0.0,
            }),
            Shape::Llama { inner } => of_llama("llama", inner),
            Shape::Mixtral { inner, experts, chosen } => {
                let mut config = of_llama("mixtral", inner);
                config["num_local_experts"] = experts.into();
                config["num_experts_per_tok"] = chosen.into();
                config
            }
        }
    }

    /// Multiplications and additions of a step: forward once, backward twice; experts that do not see a token do none for it.
    fn flops(&self, batch: usize, tokens: usize) -> f64 {
        let (width, layers) = (self.width as f64, self.layers as f64);
        let own = match self.shape {
            Shape::Gpt2 => 8.0 * width,
            Shape::Llama { inner } => 3.0 * inner as f64,
            Shape::Mixtral { inner, chosen, .. } => (3 * inner * chosen) as f64,
        };
        // GPT-2's feed-forward layer is eight squares of the width.
        let extra = 6.0 * (batch * tokens) as f64 * layers * width * (own - 8.0 * width);
        step_flops([self.layers, self.width, self.vocabulary], batch, tokens) + extra
    }

    fn decoder(&self) -> Result<Decoder, ModelError> {
        decoder(&self.config())
    }
}

/// Multiplications and additions of a step on `batch` sequences of `tokens` with a model of GPT-2's shape: forward once,
/// backward twice; masked scores do not count. (The positions are looked up, not multiplied.)
pub(super) fn step_flops([layers, width, vocabulary]: [u64; 3], batch: usize, tokens: usize) -> f64 {
    let [layers, width, vocabulary] = [layers, width, vocabulary].map(|size| size as f64);
    let (batch, tokens) = (batch as f64, tokens as f64);
    let weights = layers * 12.0 * width * width + vocabulary * width;
    let scores = layers * 2.0 * width * (tokens + 1.0) / 2.0;
    6.0 * batch * tokens * (weights + scores)
}

fn train(
    case: &Case,
    model: &Decoder,
    precision: Precision,
    device: &Device,
    [batch, tokens]: [usize; 2],
    repeats: u64,
) -> Result<Value, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Run(error.to_string());
    let mut config = json!({
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    });
    if precision == Precision::Bf16 {
        config["bf16"] = json!({"enabled": true});
    }
    let read = Config::from_value("bench", &config).map_err(|error| failed(&error))?;
    let (config, _) =
        read.resolve(std::num::NonZeroU64::MIN, &AutoValues::new()).map_err(|error| failed(&error))?;
    let setup = Setup::new(config, World::solo(), device.clone());
    let mut engine =
        initialize_model(&setup, model.parameters(), Options::default()).map_err(|error| failed(&error))?;
    let ids = ids(&[batch, tokens], case.vocabulary as usize, device).map_err(|error| failed(&error))?;
    let step = |engine: &mut Engine| -> Result<f64, Failure> {
        let began = Instant::now();
        let loss = engine
            .forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode))
            .map_err(|error: ModelError| failed(&error))?;
        engine.backward(&loss).map_err(|error| failed(&error))?;
        engine.step().map_err(|error| failed(&error))?;
        Ok(began.elapsed().as_secs_f64())
    };
    for _ in 0..2 {
        step(&mut engine)?;
    }
    let mut seconds = (0..repeats).map(|_| step(&mut engine)).collect::<Result<Vec<f64>, Failure>>()?;
    let times = engine.last_step_times();
    let peak_rss_bytes = peak_rss_bytes();
    drop(engine);
    seconds.sort_by(f64::total_cmp);
    let best_s = seconds[0];
    let config = model.config();
    // What stands alone is known of GPT-2's parts.
    let mut parts = match case.shape {
        Shape::Gpt2 => parts_of_a_step(config, precision.dtype(), device, [batch, tokens])
            .map_err(|error| failed(&error))?,
        Shape::Llama { .. } | Shape::Mixtral { .. } => Vec::new(),
    };
    parts.push(("optimizer and clipping".into(), times.step.as_secs_f64()));
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let costs: Vec<Value> = parts
        .iter()
        .map(|(name, part_s)| json!({"part": name, "seconds": part_s, "share": part_s / best_s}))
        .collect();
    Ok(json!({
        "tokens_per_s": (batch * tokens) as f64 / best_s,
        "best_s": best_s,
        "median_s": seconds[seconds.len() / 2],
        "peak_rss_bytes": peak_rss_bytes,
        "flops": case.flops(batch, tokens),
        "costs": costs,
    }))
}

fn speak(
    model: &Decoder,
    precision: Precision,
    device: &Device,
    [prompt, tokens]: [usize; 2],
    repeats: u64,
) -> Result<Value, ModelError> {
    let params = model.parameters().as_slice();
    let _store = PlainStore::attach(params, precision.dtype(), device, &FromInitializers { seed: 42 })?;
    let prompts = vec![(0..prompt as i64).map(|i| i * 31 % 256).collect()];
    let options = GenerateOptions {
        max_new_tokens: tokens,
        sampling: Sampling::Greedy,
        end_tokens: Vec::new(),
        pad_token: 0,
    };
    let mut seconds = Vec::new();
    for _ in 0..repeats + 2 {
        let began = Instant::now();
        generate(model, &prompts, None, &options, device, &mut |_, _| {})?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    let mut seconds = seconds.split_off(2);
    seconds.sort_by(f64::total_cmp);
    Ok(json!({
        "tokens_per_s": tokens as f64 / seconds[0],
        "best_s": seconds[0],
        "median_s": seconds[seconds.len() / 2],
        "peak_rss_bytes": peak_rss_bytes(),
    }))
}

fn as_text(row: &Value) -> String {
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    if row["gb_per_s"].is_number() {
        return load_as_text(row);
    }
    let mut text = format!(
        "{:<29} {:<5} {} threads {:>9.1} tokens/s  best {:>8.1} ms  median {:>8.1} ms  peak {:>6.0} MiB",
        row["case"].as_str().unwrap_or_default(),
        row["dtype"].as_str().unwrap_or_default(),
        row["threads"],
        number("tokens_per_s"),
        number("best_s") * 1e3,
        number("median_s") * 1e3,
        number("peak_rss_bytes") / (1 << 20) as f64,
    );
    if row["share_of_gemm_peak"].is_number() {
        let (share, peak) = (100.0 * number("share_of_gemm_peak"), number("gemm_peak_gflops"));
        text.push_str(&format!("  {share:.0} % of the {peak:.0} GFLOP/s of products alone"));
    }
    for cost in row["costs"].as_array().into_iter().flatten().take(3) {
        let part = |key: &str| cost[key].as_f64().unwrap_or(0.0);
        let name = cost["part"].as_str().unwrap_or_default();
        text.push_str(&format!(
            "\n    {name:<34} {:>8.1} ms {:>4.0} %",
            part("seconds") * 1e3,
            100.0 * part("share")
        ));
    }
    text
}

fn load_as_text(row: &Value) -> String {
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    let mib = |key: &str| number(key) / (1 << 20) as f64;
    format!(
        "{:<29} {:<5} {:>8.2} GB/s; reading alone {:.2} GB/s; peak {:.0} MiB, {:.0} before; the model has {:.0}, its largest tensor {:.0}",
        row["case"].as_str().unwrap_or_default(),
        row["dtype"].as_str().unwrap_or_default(),
        number("gb_per_s"),
        number("reading_gb_per_s"),
        mib("peak_rss_bytes"),
        mib("rss_before_bytes"),
        mib("model_bytes"),
        mib("largest_tensor_bytes"),
    )
}
