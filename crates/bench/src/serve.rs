//! `ferrospeed bench serve`: how many tokens an engine gives when all requests come at once, and how long clients wait when
//! they come by chance.
//!
//! The first part hands over all requests and measures the whole. The second lets them arrive with exponential gaps, as
//! independent clients would, and measures each one's time to its first token and between tokens. In place of a model there may
//! be the address of a server, which is then asked over HTTP.

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use clap::Args;
use ferrospeed_command::terminal::print_output;
use ferrospeed_command::{Failure, ServedModel};
use ferrospeed_serve::engine::Engine;
use ferrospeed_serve::metrics::Metrics;
use ferrospeed_serve::request::{Event, Request, Special, Work};
use ferrospeed_serve::sampling::SamplingOptions;
use ferrospeed_tensor::random::RandomKey;
use serde_json::{Value, json};

use super::client::Peer;

/// Time for a request.
const REQUEST_TIME: Duration = Duration::from_secs(3600);

/// Arguments of `bench serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeBenchArgs {
    #[command(flatten)]
    model: ServedModel,
    /// How many requests
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    requests: u32,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Tokens of each answer
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    new_tokens: u32,
    /// Requests that come first, all at once, and are not counted: the first of a shape builds its kernels
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=4096))]
    warm_up: u32,
    /// Requests per second on average; all at once without
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_rate)]
    rate: Option<f64>,
    /// Of prompts and gaps
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    found.ok_or_else(|| "must be a number above 0".to_owned())
}

/// What one client has seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) first_token_ms: f64,
    pub(super) gaps_ms: Vec<f64>,
    pub(super) tokens: usize,
}

/// Tokens of prompts for a server elsewhere are below this: every vocabulary has as many.
const PEER_VOCABULARY: u64 = 256;

/// Who is asked.
enum Asked {
    Own(Engine),
    Peer { peer: Peer, model: String },
}

impl Asked {
    fn new(args: &ServeBenchArgs) -> Result<Asked, Failure> {
        let Some(url) = args.model.url() else {
            let engine = args.model.start(None)?;
            let (asked, most) =
                (u64::from(args.prompt_tokens) + u64::from(args.new_tokens), engine.limits().sequence_tokens);
            if asked > most as u64 {
                return Err(Failure::Usage(format!(
                    "--prompt-tokens {} and --new-tokens {} make texts of {asked} tokens, and the model and its cache allow {most}",
                    args.prompt_tokens, args.new_tokens
                )));
            }
            return Ok(Asked::Own(engine));
        };
        if let Some(option) = args.model.engine_option() {
            return Err(Failure::Usage(format!("{option} is the server's own; start it so")));
        }
        let peer = Peer::parse(url).map_err(Failure::Usage)?;
        let model = peer.model().map_err(Failure::Run)?;
        Ok(Asked::Peer { peer, model })
    }

    fn name(&self) -> &str {
        match self {
            Asked::Own(engine) => &engine.facts().name,
            Asked::Peer { model, .. } => model,
        }
    }
}

pub(crate) fn run(args: &ServeBenchArgs) -> Result<ExitCode, Failure> {
    let asked = Asked::new(args)?;
    // Prompts of their own: the cache must not know those that count.
    ask_all(args, &asked, args.requests..args.requests + args.warm_up, None)?;
    let before = Counts::of(&asked);
    let begun = Instant::now();
    let seen = ask_all(args, &asked, 0..args.requests, args.rate)?;
    let report = report(args, &seen, begun.elapsed().as_secs_f64(), &asked, &before);
    let text = if args.json { report.to_string() } else { readable(&report) };
    print_output(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What clients with these numbers see, who come all at once or at a rate.
fn ask_all(
    args: &ServeBenchArgs,
    asked: &Asked,
    numbers: Range<u32>,
    rate: Option<f64>,
) -> Result<Vec<Seen>, Failure> {
    let begun = Instant::now();
    let seen = Mutex::new(Vec::new());
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        let mut due_s = 0.0;
        for number in numbers {
            if let Some(rate) = rate {
                let chance = RandomKey::new(args.seed, 1).uniform(u64::from(number));
                due_s += -f64::from(1.0 - chance).max(1e-9).ln() / rate;
                // Sleeping is what the client does here: its time has not come.
                std::thread::sleep(Duration::from_secs_f64(due_s).saturating_sub(begun.elapsed()));
            }
            let (seen, failure) = (&seen, &failure);
            let client = move || match client(args, asked, number) {
                Ok(one) => seen.lock().expect("no client panics").push(one),
                Err(why) => *failure.lock().expect("no client panics") = Some(why),
            };
            scope.spawn(client);
        }
    });
    match failure.into_inner().expect("no client panics") {
        Some(why) => Err(Failure::Run(why)),
        None => Ok(seen.into_inner().expect("no client panics")),
    }
}

fn client(args: &ServeBenchArgs, asked: &Asked, index: u32) -> Result<Seen, String> {
    let vocabulary = match asked {
        Asked::Own(engine) => engine.facts().vocabulary as u64,
        Asked::Peer { .. } => PEER_VOCABULARY,
    };
    let key = RandomKey::new(args.seed, 2 + index);
    let token = |place: u32| (u64::from(key.word(u64::from(place))) % vocabulary) as i64;
    let prompt: Vec<i64> = (0..args.prompt_tokens).map(token).collect();
    let engine = match asked {
        Asked::Own(engine) => engine,
        Asked::Peer { peer, model } => return peer.complete(model, &prompt, args.new_tokens),
    };
    let work = Work::Generate {
        answers: vec![SamplingOptions::default()],
        max_tokens: Some(args.new_tokens as usize),
        stops: Vec::new(),
        stop_tokens: Vec::new(),
        special: Special::Hidden,
    };
    let sent = Instant::now();
    let mut last = sent;
    let mut seen = Seen::default();
    for event in engine.ask(Request { prompt, work, first_answer: 0, deadline: sent + REQUEST_TIME }) {
        match event {
            Event::Token { .. } => {
                let now = Instant::now();
                let ms = (now - last).as_secs_f64() * 1e3;
                if seen.tokens == 0 {
                    seen.first_token_ms = ms
                } else {
                    seen.gaps_ms.push(ms)
                }
                (seen.tokens, last) = (seen.tokens + 1, now);
            }
            Event::Trouble(trouble) => return Err(format!("a request was not answered: {trouble}")),
            Event::Finished { .. } | Event::Embedding { .. } | Event::Scored { .. } => {}
        }
    }
    Ok(seen)
}

/// What an engine of our own has counted so far.
#[derive(Debug)]
struct Counts {
    passes: u64,
    guessed_tokens: u64,
    accepted_tokens: u64,
}

impl Counts {
    fn of(asked: &Asked) -> Option<Counts> {
        let Asked::Own(engine) = asked else { return None };
        let Metrics { passes, guessed_tokens, accepted_tokens, .. } = engine.metrics();
        let [passes, guessed_tokens, accepted_tokens] =
            [passes, guessed_tokens, accepted_tokens].map(|count| count.load(Relaxed));
        Some(Counts { passes, guessed_tokens, accepted_tokens })
    }
}

fn report(
    args: &ServeBenchArgs,
    seen: &[Seen],
    wall_s: f64,
    asked: &Asked,
    before: &Option<Counts>,
) -> Value {
    let new_tokens: usize = seen.iter().map(|one| one.tokens).sum();
    let prompt_tokens = seen.len() * args.prompt_tokens as usize;
    let spread = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            values.get(((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1)))
        };
        json!({"p50": at(0.5), "p99": at(0.99)})
    };
    let after = Counts::of(asked);
    let counted = |count: fn(&Counts) -> u64| Some(count(after.as_ref()?) - count(before.as_ref()?));
    json!({
        "model": asked.name(),
        "requests": seen.len(),
        "warm_up_requests": args.warm_up,
        "rate_per_s": args.rate,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "wall_s": wall_s,
        "new_tokens_per_s": new_tokens as f64 / wall_s,
        "all_tokens_per_s": (prompt_tokens + new_tokens) as f64 / wall_s,
        "passes": counted(|counts| counts.passes),
        "guessed_tokens": counted(|counts| counts.guessed_tokens),
        "accepted_tokens": counted(|counts| counts.accepted_tokens),
        "first_token_ms": spread(seen.iter().map(|one| one.first_token_ms).collect()),
        "between_tokens_ms": spread(seen.iter().flat_map(|one| one.gaps_ms.iter().copied()).collect()),
    })
}

fn readable(report: &Value) -> String {
    let number = |path: &str| report.pointer(path).and_then(Value::as_f64).unwrap_or(f64::NAN);
    let between = |path: &str| match report.pointer(path).and_then(Value::as_f64) {
        Some(ms) => format!("{ms:.2} ms"),
        None => "–".to_owned(),
    };
    format!(
        "{} requests in {:.2} s: {:.1} new tokens/s, {:.1} with prompts\nfirst token: {:.1} ms median, {:.1} ms at 99 %\n\
         between tokens: {} median, {} at 99 %",
        report["requests"],
        number("/wall_s"),
        number("/new_tokens_per_s"),
        number("/all_tokens_per_s"),
        number("/first_token_ms/p50"),
        number("/first_token_ms/p99"),
        between("/between_tokens_ms/p50"),
        between("/between_tokens_ms/p99"),
    )
}
