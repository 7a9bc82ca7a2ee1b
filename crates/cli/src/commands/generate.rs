//! `ferrospeed generate`: continues a text with a model from a Hugging Face directory or a GGUF file.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::hub::base_at;
use ferrospeed_command::terminal::{Paint, print_note, visible};
use ferrospeed_command::{DeviceChoice, Failure, NamedModel};
use ferrospeed_models::decoder::{Positions, dtype_of_name};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::{Decoder, ModelConfig, ModelFiles};
use ferrospeed_serve::model::codec_of;
use ferrospeed_tensor::store::PlainStore;

/// More than any model was made for, and few enough to be counted and held.
const MAX_TOKENS: u64 = 1 << 24;

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    model: NamedModel,
    /// The model that an adapter is of [default: the directory that the adapter names]
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// The text to continue
    #[arg(long)]
    prompt: String,
    /// How many tokens to write
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(0..=MAX_TOKENS))]
    tokens: u64,
    /// How freely to draw; 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true, value_parser = parse_temperature)]
    temperature: f32,
    /// Draw only from this many of the likeliest tokens
    #[arg(long, allow_negative_numbers = true, value_parser = parse_top_k)]
    top_k: Option<usize>,
    /// Draw only from the likeliest tokens that together reach this probability
    #[arg(long, allow_negative_numbers = true, value_parser = parse_top_p)]
    top_p: Option<f32>,
    /// Makes the draw repeatable
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The type to compute in [default: the model's own]
    #[arg(long, value_parser = ["float32", "bfloat16", "float16"])]
    dtype: Option<String>,
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "FERROSPEED_DEVICE", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
}

pub(super) fn parse_temperature(text: &str) -> Result<f32, String> {
    let usable = |temperature: &f32| temperature.is_finite() && *temperature >= 0.0;
    let found = text.parse().ok().filter(usable);
    found.ok_or_else(|| "must be a number of 0 (always the likeliest token) or more".to_owned())
}

fn parse_top_k(text: &str) -> Result<usize, String> {
    let found = text.parse().ok().filter(|&count| count >= 1);
    found
        .ok_or_else(|| "must be a whole number of 1 or more; leave it out to draw from all tokens".to_owned())
}

pub(super) fn parse_top_p(text: &str) -> Result<f32, String> {
    let found = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    found.ok_or_else(|| {
        "must be a probability above 0 and at most 1; leave it out to draw from all tokens".to_owned()
    })
}

pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode, Failure> {
    let usage = |error: ferrospeed_models::ModelError| Failure::Usage(error.to_string());
    let failed = |error: &dyn std::fmt::Display| Failure::Run(error.to_string());
    if args.prompt.is_empty() {
        return Err(Failure::Usage("--prompt must not be empty".into()));
    }
    let place = args.model.place()?;
    let base = base_at(&place, args.base.as_deref())?;
    let files = ModelFiles::open_on(&place, base.as_deref()).map_err(usage)?;
    let ModelConfig::Decoder(config) = files.model().map_err(usage)? else {
        return Err(Failure::Usage(format!("{} is not a causal language model", place.display())));
    };
    let codec = codec_of(&files, config.vocab).map_err(|error| Failure::Usage(error.to_string()))?;
    let model = Decoder::new(*config);
    files.weights().check(model.parameters().as_slice()).map_err(usage)?;
    let dtype = args.dtype.as_deref().and_then(dtype_of_name).unwrap_or(files.dtype());
    let device = args.device.open()?;
    let _store = PlainStore::attach(model.parameters().as_slice(), dtype, &device, files.source())
        .map_err(|e| failed(&e))?;

    let prompt: Vec<i64> =
        codec.encode_prompt(&args.prompt).map_err(|e| failed(&e))?.into_iter().map(i64::from).collect();
    check_prompt(&prompt, model.config().vocab)?;
    let sampling = if args.temperature == 0.0 {
        Sampling::Greedy
    } else {
        Sampling::Random {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
        }
    };
    let tokens = room_for(&model, prompt.len(), args.tokens as usize)?;
    let end_tokens = files.end_tokens().map_err(usage)?.into_iter().chain(codec.end_token().map(i64::from));
    let options =
        GenerateOptions { max_new_tokens: tokens, sampling, end_tokens: end_tokens.collect(), pad_token: 0 };
    let written =
        generate(&model, &[prompt], None, &options, &device, &mut |_, _| {}).map_err(|e| failed(&e))?;
    let text = codec.decode(&written[0]).map_err(|e| failed(&e))?;
    // A program that reads it gets what the model wrote; a terminal does not obey it.
    let text =
        if std::io::stdout().is_terminal() { visible(&text, Paint::for_stdout()) } else { text.into() };
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        // A reader that went away is no failure.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Run(format!("cannot write the text: {error}")))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Refuses what a tokenizer has made of a prompt where the model cannot read it.
fn check_prompt(prompt: &[i64], vocabulary: usize) -> Result<(), Failure> {
    let why = match prompt.iter().max() {
        None => "--prompt: the model's tokenizer makes no token of it".to_owned(),
        Some(&token) if token >= vocabulary as i64 => format!(
            "the tokenizer is another model's: it gives the token {token}, and this one has {vocabulary} tokens"
        ),
        Some(_) => return Ok(()),
    };
    Err(Failure::Usage(why))
}

/// How many tokens are written where `asked` were wanted behind a prompt; says so where the model was not made for so many.
fn room_for(model: &Decoder, prompt: usize, asked: usize) -> Result<usize, Failure> {
    let longest = model.config().max_tokens;
    if prompt.saturating_add(asked) <= longest {
        return Ok(asked);
    }
    let said = format!(
        "the model was made for {longest} tokens, and {prompt} of prompt with {asked} new ones are more"
    );
    match (&model.config().positions, longest.saturating_sub(prompt)) {
        (Positions::Learned { .. }, 0) => Err(Failure::Usage(format!("{said}; shorten the prompt"))),
        (Positions::Learned { .. }, room) => {
            print_note(&format!("{said}: {room} new ones are written"));
            Ok(room)
        }
        (Positions::Rotary(_) | Positions::Alibi, _) => {
            print_note(&format!("{said}: what is written beyond them may make no sense"));
            Ok(asked)
        }
    }
}
