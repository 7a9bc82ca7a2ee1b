//! `ferrospeed serve`: answers OpenAI's requests with a model from a Hugging Face directory.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_command::terminal::{print_error, print_line, print_note, print_output};
use ferrospeed_command::{Failure, ServedModel, place};
use ferrospeed_launch::supervise::OutputMode;
use ferrospeed_launch::{JobOutcome, LocalJob};
use ferrospeed_serve::Engine;
use ferrospeed_serve::model::Division;
use ferrospeed_serve::server::{self, ServerOptions};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    model: ServedModel,
    /// Hold the model in so many slices, each by a process of its own (and on a GPU of its own, where there are such)
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    tp: u32,
    /// Hold the experts of a mixture apart in so many processes, each with some of them; the other layers are in slices with --tp,
    /// which must be the same number, else whole in each
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ep: u32,
    /// The address to listen on; loopback is reached from this machine alone
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port; 0 takes one that is free
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// A key that clients must send; may be given several times
    #[arg(
        long,
        value_name = "KEY",
        env = "FERROSPEED_API_KEY",
        hide_env_values = true,
        value_delimiter = ','
    )]
    api_key: Vec<String>,
    /// What clients call the model [default: the directory's name]
    #[arg(long)]
    name: Option<String>,
    /// Bytes of a request, at most
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20)]
    max_body_bytes: usize,
    /// Connections at once
    #[arg(long, value_name = "COUNT", default_value_t = 1024)]
    max_connections: usize,
    /// Seconds for a request, from its arrival to its last token
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    request_time_s: u64,
    /// Seconds that running requests get when the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace_s: u64,
}

pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode, Failure> {
    if args.api_key.iter().any(|key| key.trim().is_empty()) {
        return Err(Failure::Usage("--api-key must not be empty".into()));
    }
    let division = Division::of(args.tp as usize, args.ep as usize);
    let Some((division, ranks)) = division.map_err(|error| Failure::Usage(error.to_string()))? else {
        return serve(args, args.model.start(args.name.as_deref())?);
    };
    let Some(place) = place::of_this_process()? else { return start_ranks(args, division, ranks) };
    let world = World::connect(place).map_err(|error| Failure::Run(error.to_string()))?;
    if world.size() != ranks {
        let found = world.size();
        let option = if args.tp > 1 { "--tp" } else { "--ep" };
        return Err(Failure::Usage(format!("{option} {ranks} needs as many ranks; there are {found}")));
    }
    if world.rank() == 0 {
        return serve(args, args.model.start_in(args.name.as_deref(), Some((world.group(), division)))?);
    }
    // The first rank decides when it is over.
    let heard = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, heard.clone())
            .map_err(|error| Failure::Run(format!("cannot watch for signals: {error}")))?;
    }
    args.model.follow(&world.group(), division)?;
    Ok(ExitCode::SUCCESS)
}

/// Starts this program again, once for each rank.
fn start_ranks(args: &ServeArgs, division: Division, ranks: usize) -> Result<ExitCode, Failure> {
    args.model.check(division, ranks)?;
    let program = std::env::current_exe()
        .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
    let mut words = Vec::new();
    for word in std::env::args_os().skip(1) {
        let word = word.into_string();
        words.push(word.map_err(|word| Failure::Usage(format!("{} is not UTF-8", word.display())))?);
    }
    let mut job = LocalJob::new(program.display().to_string(), words, args.tp.max(args.ep));
    job.output = OutputMode::Plain;
    job.interrupt_grace = Duration::from_secs(args.grace_s.saturating_add(10));
    job.share_cores();
    let outcome = job.run()?;
    match &outcome {
        // A server that ends in order when it is told has done well.
        JobOutcome::Interrupted { all_well: true, .. } => return Ok(ExitCode::SUCCESS),
        JobOutcome::Failed(report) => print_error(&report.to_string()),
        JobOutcome::Interrupted { .. } | JobOutcome::Succeeded => {}
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

/// Answers until it is told to stop.
fn serve(args: &ServeArgs, engine: Engine) -> Result<ExitCode, Failure> {
    if !args.host.is_loopback() && args.api_key.is_empty() {
        print_note(&format!(
            "{} is reached from other machines, and everyone may ask: consider --api-key",
            args.host
        ));
    }
    if let Some(note) = args.model.shortened(&engine) {
        print_note(&note);
    }
    engine.facts().notes().iter().for_each(|note| print_note(note));
    if engine.facts().template.is_plain() {
        print_note("the model brings no chat template; chats are put to it as lines of 'role: text'");
    }
    let options = ServerOptions {
        api_keys: args.api_key.clone(),
        max_body_bytes: args.max_body_bytes,
        request_time: Duration::from_secs(args.request_time_s),
        max_connections: args.max_connections.max(1),
        grace: Duration::from_secs(args.grace_s),
    };
    let name = engine.facts().name.clone();
    let longest = engine.limits().sequence_tokens;
    let ready = |address: SocketAddr| {
        // Nobody may be reading; the server goes on.
        let _ = print_output(&format!("http://{address}  ({name}, up to {longest} tokens; Ctrl-C ends it)"));
    };
    server::run(SocketAddr::new(args.host, args.port), engine, options, ready)
        .map_err(|error| Failure::Run(error.to_string()))?;
    print_line("the server has ended");
    Ok(ExitCode::SUCCESS)
}
