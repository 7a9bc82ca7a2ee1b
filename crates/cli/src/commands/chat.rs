//! `ferrospeed chat`: a talk with a model in the terminal. Lines that begin with `/` are said to the program.

use std::io::{BufRead, IsTerminal, Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use ferrospeed_command::terminal::{Paint, print_error, print_note, visible};
use ferrospeed_command::{Failure, ServedModel};
use ferrospeed_serve::engine::Engine;
use ferrospeed_serve::request::{Event, Request, Special, Work};
use ferrospeed_serve::sampling::SamplingOptions;
use ferrospeed_text::Message;

use super::generate::{parse_temperature, parse_top_p};

/// No line is longer.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Time for an answer.
const ANSWER_TIME: Duration = Duration::from_secs(3600);

/// Arguments of `chat`.
#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    model: ServedModel,
    /// What the assistant is told before the talk
    #[arg(long)]
    system: Option<String>,
    /// Tokens of an answer, at most
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// How freely to draw; 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true, value_parser = parse_temperature)]
    temperature: f32,
    /// Draw only from the likeliest tokens that together reach this probability
    #[arg(long, allow_negative_numbers = true, value_parser = parse_top_p)]
    top_p: Option<f32>,
    /// Makes the draw repeatable
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

pub(crate) fn run(args: &ChatArgs) -> Result<ExitCode, Failure> {
    let engine = args.model.start(None)?;
    engine.facts().notes().iter().for_each(|note| print_note(note));
    let mut talk: Vec<Message> = Vec::new();
    let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    talk.extend(args.system.as_deref().map(|text| message("system", text)));
    let asks = std::io::stdin().is_terminal();
    if asks {
        print_note("/help says what else can be said than what is asked; Ctrl-D ends it");
    }
    let (mut unanswered, mut tries) = (false, 0);
    let mut input = std::io::stdin().lock();
    loop {
        if asks {
            write_out("> ");
        }
        let line = match next_line(&mut input)
            .map_err(|error| Failure::Run(format!("cannot read what you say: {error}")))?
        {
            None => break,
            Some(Ok(line)) => line,
            Some(Err(why)) => {
                print_error(&why);
                unanswered = true;
                continue;
            }
        };
        match Word::of(&line) {
            _ if line.trim().is_empty() => continue,
            None => {
                tries = 0;
                talk.push(message("user", &line));
            }
            Some(Word::Help) => {
                write_out(HELP);
                continue;
            }
            Some(Word::Quit) => break,
            Some(Word::New) => {
                talk.retain(|message| message.role == "system");
                continue;
            }
            Some(Word::Undo) => {
                take_back(&mut talk, "user");
                continue;
            }
            Some(Word::Again) => {
                take_back(&mut talk, "assistant");
                tries += 1;
                if talk.last().is_none_or(|message| message.role != "user") {
                    print_error("nothing has been asked yet");
                    continue;
                }
            }
        }
        match answer(args, &engine, &talk, tries) {
            Ok(text) => talk.push(message("assistant", &text)),
            Err(why) => {
                // What could not be answered is no part of the talk.
                talk.pop();
                print_error(&why);
                unanswered = true;
            }
        }
    }
    // A person has seen it, and said something else; a script looks at the code.
    Ok(if unanswered && !asks { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What is said next, or why it cannot be part of the talk; `None` at the end.
fn next_line(input: &mut impl BufRead) -> std::io::Result<Option<Result<String, String>>> {
    let mut line = Vec::new();
    let read = input.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line)?;
    if read as u64 > MAX_LINE_BYTES {
        input.skip_until(b'\n')?;
        return Ok(Some(Err(format!("that line is longer than {MAX_LINE_BYTES} bytes, and is left out"))));
    }
    let refuse = |_| "that line is no UTF-8 text, and is left out: say it again".to_owned();
    Ok((read > 0).then(|| String::from_utf8(line).map_err(refuse)))
}

/// What is said to this program and not to the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Help,
    New,
    Undo,
    Again,
    Quit,
}

const HELP: &str = "\
/new    begin a new talk; what --system says stays
/undo   take back what was asked last, and its answer
/again  answer the last question otherwise
/help   this list
/quit   end it, as Ctrl-D does
";

impl Word {
    fn of(line: &str) -> Option<Word> {
        Some(match line.trim() {
            "/help" | "/?" => Word::Help,
            "/new" | "/reset" | "/clear" => Word::New,
            "/undo" => Word::Undo,
            "/again" | "/retry" | "/regen" => Word::Again,
            "/quit" | "/exit" | "/bye" => Word::Quit,
            _ => return None,
        })
    }
}

/// Takes back what was said last by a role, and all that came after it.
fn take_back(talk: &mut Vec<Message>, role: &str) {
    if let Some(at) = talk.iter().rposition(|message| message.role == role) {
        talk.truncate(at);
    }
}

fn answer(args: &ChatArgs, engine: &Engine, talk: &[Message], tries: u64) -> Result<String, String> {
    let facts = engine.facts();
    let prompt = facts.template.render(talk)?;
    let prompt = facts.readable(facts.codec.encode(&prompt).map_err(|error| error.to_string())?)?;
    let longest = engine.limits().sequence_tokens;
    let room = longest.saturating_sub(prompt.len());
    if room == 0 {
        return Err(format!(
            "the talk has come to {} tokens, and {longest} are the most that this model or its cache holds: say it in \
             fewer words, or begin a new talk with /new",
            prompt.len()
        ));
    }
    if args.tokens == 0 {
        write_out("\n");
        return Ok(String::new());
    }
    let sampling = SamplingOptions {
        temperature: args.temperature,
        top_p: args.top_p.unwrap_or(1.0),
        seed: args.seed.wrapping_add(talk.len() as u64).wrapping_add(tries << 32),
        ..Default::default()
    };
    let work = Work::Generate {
        answers: vec![sampling],
        max_tokens: Some(args.tokens.min(room)),
        stops: Vec::new(),
        stop_tokens: facts.end_tokens.clone(),
        special: Special::Hidden,
    };
    let mut whole = String::new();
    for event in engine.ask(Request { prompt, work, first_answer: 0, deadline: Instant::now() + ANSWER_TIME })
    {
        match event {
            Event::Token { text, .. } | Event::Finished { text, .. } => {
                write_out(&text);
                whole += &text;
            }
            Event::Embedding { .. } | Event::Scored { .. } => {}
            Event::Trouble(trouble) => {
                write_out("\n");
                return Err(trouble.to_string());
            }
        }
    }
    write_out("\n");
    Ok(whole)
}

/// Writes at once; a terminal does not obey what the model says.
fn write_out(text: &str) {
    let mut out = std::io::stdout().lock();
    let shown = if out.is_terminal() { visible(text, Paint::for_stdout()) } else { text.into() };
    // A reader that went away is no failure.
    let _ = out.write_all(shown.as_bytes());
    let _ = out.flush();
}
