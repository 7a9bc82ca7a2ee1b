//! `ferrospeed bench profile`: what it costs to look at a step.
//!
//! One rank trains a model of GPT-2's shape. Steps take turns: a plain one, one whose operations are counted, one that is traced,
//! one in which the norms of layers' gradients are taken; so that whatever else the machine does meanwhile falls on all alike.
//! The median of each is laid beside the plain one's, on the wall and in processor time, which a busy machine disturbs less. What looking costs where nobody looks is the mark that every module leaves:
//! it is timed by itself and counted, for it is too little to be seen in a step.

use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_models::{Decoder, ModelError, Tokens};
use ferrospeed_tensor::{Device, Tensor, profile};
use serde_json::{Value, json};

use super::measure::{gpt2, ids, parse_width, processor_s};

/// Marks that are timed to know one.
const MARKS: u32 = 1_000_000;
/// Slices that a trace keeps of a step.
const MOST_SLICES: usize = 200_000;

#[derive(Debug, Args)]
pub(super) struct ProfileBenchArgs {
    /// Threads
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Blocks of the model
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..))]
    layers: u64,
    /// Width of the model: a multiple of 64
    #[arg(long, default_value_t = 768, value_parser = parse_width)]
    width: u64,
    /// Tokens that the model knows
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u64).range(1..))]
    vocabulary: u64,
    /// Sequences of a micro-batch
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..))]
    tokens: u64,
    /// Rounds, each with a step of every kind, after one to warm up
    #[arg(long, value_name = "COUNT", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..))]
    repeats: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// How a step is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    Not,
    Counted,
    Traced,
    LayerNorms,
}

impl Look {
    const ALL: [Look; 4] = [Look::Not, Look::Counted, Look::Traced, Look::LayerNorms];

    fn name(self) -> &'static str {
        match self {
            Look::Not => "off",
            Look::Counted => "flops_profiler",
            Look::Traced => "trace",
            Look::LayerNorms => "gradient_norms",
        }
    }
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Run(error.to_string())
}

struct Subject {
    engine: Engine,
    model: Decoder,
    device: Device,
    ids: Tensor,
}

impl Subject {
    fn new(args: &ProfileBenchArgs) -> Result<Subject, Failure> {
        let model = gpt2(args.layers, args.width, args.vocabulary, args.tokens).map_err(failed)?;
        let settings = json!({
            "train_micro_batch_size_per_gpu": args.batch,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        });
        let read = Config::from_value("bench", &settings).map_err(failed)?;
        let (config, _) = read.resolve(std::num::NonZeroU64::MIN, &AutoValues::new()).map_err(failed)?;
        let device = ferrospeed_cpu::with_threads(args.threads as usize);
        let setup = Setup::new(config, World::solo(), device.clone());
        let engine = initialize_model(&setup, model.parameters(), Options::default()).map_err(failed)?;
        let shape = [args.batch as usize, args.tokens as usize];
        let ids = ids(&shape, args.vocabulary as usize, &device).map_err(failed)?;
        Ok(Subject { engine, model, device, ids })
    }

    /// A step; its seconds on the wall and of processors.
    fn step(&mut self, look: Look) -> Result<[f64; 2], Failure> {
        self.engine.watch_gradients(u64::from(look == Look::LayerNorms)).map_err(failed)?;
        let (began, before_s) = (Instant::now(), processor_s());
        let device = self.device.clone();
        match look {
            Look::Not | Look::LayerNorms => self.plain()?,
            Look::Counted => profile::collect(&device, || self.plain()).0?,
            Look::Traced => profile::timeline(&device, MOST_SLICES, || self.plain()).0?,
        }
        Ok([began.elapsed().as_secs_f64(), processor_s() - before_s])
    }

    fn plain(&mut self) -> Result<(), Failure> {
        let Subject { engine, model, ids, .. } = self;
        let loss = engine
            .forward(|mode| model.loss(&Tokens::new(ids.clone()), ids, mode))
            .map_err(|error: ModelError| failed(error))?;
        engine.backward(&loss).map_err(failed)?;
        engine.step().map_err(failed)?;
        Ok(())
    }

    /// Marks that a step leaves: changes of module, of which a trace has one slice each.
    fn marks(&mut self) -> Result<usize, Failure> {
        let device = self.device.clone();
        let (done, slices) = profile::timeline(&device, MOST_SLICES, || self.plain());
        done.map(|()| slices.len())
    }
}

pub(super) fn run(args: &ProfileBenchArgs) -> Result<ExitCode, Failure> {
    let mut subject = Subject::new(args)?;
    for look in Look::ALL {
        subject.step(look)?;
    }
    let mut seconds = Look::ALL.map(|_| Vec::new());
    for _ in 0..args.repeats {
        for (look, seconds) in Look::ALL.into_iter().zip(&mut seconds) {
            seconds.push(subject.step(look)?);
        }
    }
    let median = |seconds: &[[f64; 2]], clock: usize| {
        let mut sorted: Vec<f64> = seconds.iter().map(|clocks| clocks[clock]).collect();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    let [off_s, off_processor_s] = [0, 1].map(|clock| median(&seconds[0], clock));
    let (mark_ns, marks) = (mark_ns(), subject.marks()?);
    let unseen = json!({
        "look": "off, by itself", "mark_ns": mark_ns, "marks": marks,
        "cost_percent": 100.0 * mark_ns * marks as f64 / (off_s * 1e9),
    });
    let rows = Look::ALL.into_iter().zip(&seconds).map(|(look, seconds)| {
        let [median_s, processor_s] = [0, 1].map(|clock| median(seconds, clock));
        let best_s = seconds.iter().map(|clocks| clocks[0]).fold(f64::INFINITY, f64::min);
        json!({
            "look": look.name(), "median_s": median_s, "best_s": best_s, "processor_s": processor_s,
            "cost_percent": 100.0 * (median_s / off_s - 1.0),
            "processor_cost_percent": 100.0 * (processor_s / off_processor_s - 1.0),
        })
    });
    for row in rows.chain([unseen]) {
        terminal::print_output(&if args.json { row.to_string() } else { as_text(&row) })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Nanoseconds of a mark where nobody looks.
fn mark_ns() -> f64 {
    let began = Instant::now();
    for _ in 0..MARKS {
        std::hint::black_box(profile::scope_at("mark", "Mark", || std::hint::black_box(0)));
    }
    began.elapsed().as_nanos() as f64 / f64::from(MARKS)
}

fn as_text(row: &Value) -> String {
    let name = row["look"].as_str().unwrap_or_default();
    let cost = row["cost_percent"].as_f64().unwrap_or(0.0);
    match row["median_s"].as_f64() {
        Some(median_s) => {
            let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
            let (best_ms, processor_ms) = (1e3 * number("best_s"), 1e3 * number("processor_s"));
            let of_processor = number("processor_cost_percent");
            format!(
                "{name:<16} median {:>8.2} ms, best {best_ms:>8.2} ms: {cost:>+6.2} %; processor {processor_ms:>8.2} ms: {of_processor:>+6.2} %",
                1e3 * median_s
            )
        }
        None => format!(
            "{name:<16} {} marks of {:.1} ns: {cost:.4} % of a step",
            row["marks"],
            row["mark_ns"].as_f64().unwrap_or(0.0)
        ),
    }
}
