//! `ferrospeed serve`: answers OpenAI's requests with a model from a Hugging Face directory.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ferrospeed_serve::server::{self, ServerOptions};

use super::served_model::ServedModel;
use crate::failure::Failure;
use crate::terminal::{print_line, print_note, print_output};

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    model: ServedModel,
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
    let engine = args.model.start(args.name.as_deref())?;
    if !args.host.is_loopback() && args.api_key.is_empty() {
        print_note(&format!(
            "{} is reached from other machines, and everyone may ask: consider --api-key",
            args.host
        ));
    }
    if let Some(note) = args.model.shortened(&engine) {
        print_note(&note);
    }
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
