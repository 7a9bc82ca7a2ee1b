//! `ferrospeed profile`: what the modules of a model cost, counted while it runs.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_engine::{ModelProfile, machine};
use ferrospeed_models::{Decoder, ModelConfig, ModelError, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_observe::flops::format::NumberStyle;
use ferrospeed_observe::flops::{ReportOptions, write_report};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Tensor, autograd};

use super::model::read_config;
use super::output_file::check_kind;

/// Modules of the roofline's table.
const MOST_MODULES: usize = 30;

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// A model: its Hugging Face folder, its config.json or its GGUF file; weights are not needed
    #[arg(value_name = "DIR")]
    model: PathBuf,
    /// Sequences at a time
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    batch: u64,
    /// Tokens of a sequence [default: the model's longest, 128 at most]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    sequence: Option<u64>,
    /// Take gradients too, and say what they cost
    #[arg(long)]
    backward: bool,
    /// Compute blocks again in backward instead of keeping their activations
    #[arg(long, requires = "backward")]
    activation_checkpointing: bool,
    /// Print the tree of modules
    #[arg(long)]
    detailed: bool,
    /// How deep the summary by class goes; -1 goes to the level above the last
    #[arg(long, value_name = "LEVELS", default_value_t = -1, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    depth: i64,
    /// Classes named at each level
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    top: u64,
    /// Measure the machine's peaks, and say of each module what share of them it reaches and which limit binds
    #[arg(long)]
    roofline: bool,
    /// Write the report there instead of to the terminal
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode, Failure> {
    let (path, json) = read_config(&args.model)?;
    let refuse = |error: ModelError| Failure::Usage(format!("{}: {error}", path.display()));
    args.output.as_deref().map_or(Ok(()), check_kind)?;
    let config = match ModelConfig::from_value(&json, WindowRule::default()).map_err(refuse)? {
        ModelConfig::Decoder(config) => *config,
        ModelConfig::Bert(_) => {
            let why = "only causal language models are profiled; BERT is none";
            return Err(Failure::Usage(format!("{}: {why}", path.display())));
        }
    };
    let longest = config.max_tokens as u64;
    let sequence = args.sequence.unwrap_or(longest.min(128));
    let vocabulary = config.vocab;
    let mut model = Decoder::new(config);
    model.set_activation_checkpointing(args.activation_checkpointing);
    let measured = measure(&model, args, sequence, vocabulary);
    let profile = measured.map_err(|error| Failure::Run(format!("{}: {error}", path.display())))?;
    let options = ReportOptions { module_depth: args.depth, top_modules: args.top, detailed: args.detailed };
    let mut text = profile.report(1, &options);
    if args.backward {
        text.push_str(&passes(&profile));
    }
    if args.roofline {
        let peak = machine::measure_peak(&ferrospeed_cpu::device(), DType::F32);
        let peak = peak.map_err(|error| Failure::Run(format!("the machine's peak: {error}")))?;
        text.push_str(&profile.roofline(peak).table(MOST_MODULES));
    }
    match &args.output {
        Some(file) => write_report(file, &text).map_err(|error| Failure::Run(error.to_string()))?,
        None => terminal::print_output(&text)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(
    model: &Decoder,
    args: &ProfileArgs,
    sequence: u64,
    vocabulary: usize,
) -> Result<ModelProfile, ModelError> {
    let device = ferrospeed_cpu::device();
    let params = model.parameters();
    let _store = PlainStore::attach(params.as_slice(), DType::F32, &device, &FromInitializers { seed: 1 })?;
    let (batch, tokens) = (args.batch as usize, sequence as usize);
    let ids: Vec<i64> = (0..batch * tokens).map(|place| (place % vocabulary) as i64).collect();
    let ids = Tensor::from_slice(&ids, [batch, tokens], &device)?;
    ModelProfile::measure(&device, params, 1, || -> Result<(), ModelError> {
        let input = Tokens::new(ids.clone());
        if args.backward {
            return Ok(autograd::backward(&model.loss(&input, &ids, Mode::Evaluate)?)?);
        }
        autograd::no_grad(|| model.logits(&model.hidden(&input, None, Mode::Evaluate)?))?;
        Ok(())
    })
}

/// What the report of DeepSpeed does not have: backward and recomputation as they were counted.
fn passes(profile: &ModelProfile) -> String {
    let style = NumberStyle::default();
    let total = profile.total();
    let mut text = String::new();
    let rows =
        [("forward", total.forward), ("backward", total.backward), ("recomputation", total.recomputation)];
    for (pass, work) in rows {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{pass:<14} {:>14}  {:>14}  {:>10}",
            style.number(work.flops as f64) + "flops",
            style.macs(work.macs as f64),
            style.duration(work.time.as_secs_f64())
        );
    }
    text
}
