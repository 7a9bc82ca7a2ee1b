//! How commands are spelt: one place for what holds for all of them.
//!
//! Every long option is taken with `-` and with `_` between its words, as people have it from DeepSpeed (`--num_gpus`) and from vLLM
//! (`--max-model-len`). The help shows commands in groups. An option that another program calls otherwise is answered with ours.

use std::ffi::OsString;
use std::fmt::Write;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, CommandFactory, FromArgMatches};

use super::Cli;

/// The groups of the help, and their commands in order.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Train", &["train", "launch", "agent", "plan", "config", "data", "init"]),
    ("Look", &["watch", "eval", "profile"]),
    ("Use", &["generate", "chat", "serve"]),
    ("Convert", &["model", "checkpoint"]),
    ("Diagnose", &["doctor", "bench", "trace", "completions"]),
];

/// What other programs call an option, the command that has it here (any, if empty), and what to write.
const ELSEWHERE: [(&str, &str, &str); 38] = [
    ("zero", "train", "--set zero_optimization.stage=3"),
    ("zero-stage", "train", "--set zero_optimization.stage=3"),
    ("stage", "train", "--set zero_optimization.stage=3"),
    ("deepspeed", "train", "a recipe whose ds_config names the file, or --set ds_config=FILE"),
    ("deepspeed-config", "train", "a recipe whose ds_config names the file, or --set ds_config=FILE"),
    ("num-gpus", "train", "-n COUNT (--ranks)"),
    ("nproc-per-node", "train", "-n COUNT (--ranks)"),
    ("num-processes", "train", "-n COUNT (--ranks)"),
    ("nproc-per-node", "launch", "-n COUNT"),
    ("nnodes", "launch", "--num_nodes COUNT, with a hostfile (-H)"),
    ("steps", "train", "--set steps=COUNT"),
    ("max-steps", "train", "--set steps=COUNT"),
    ("epochs", "train", "--set epochs=COUNT"),
    ("num-train-epochs", "train", "--set epochs=COUNT"),
    ("lr", "train", "--set training.learning_rate=RATE"),
    ("learning-rate", "train", "--set training.learning_rate=RATE"),
    ("batch-size", "train", "--set train_micro_batch_size_per_gpu=COUNT"),
    ("per-device-train-batch-size", "train", "--set training.per_device_train_batch_size=COUNT"),
    ("gradient-accumulation-steps", "train", "--set gradient_accumulation_steps=COUNT"),
    ("bf16", "train", "--set bf16.enabled=true"),
    ("fp16", "train", "--set fp16.enabled=true"),
    ("model", "train", "--set model.path=DIR, or org/name of the Hugging Face Hub"),
    ("model-name-or-path", "train", "--set model.path=DIR, or org/name of the Hugging Face Hub"),
    ("dataset-name", "train", "--set data.hub=org/name"),
    ("output-dir", "train", "--out DIR"),
    ("resume-from-checkpoint", "train", "--resume, with auto, a tag or a folder"),
    ("max-model-len", "", "--max-length TOKENS"),
    ("ctx-size", "", "--max-length TOKENS"),
    ("tensor-parallel-size", "serve", "--tp COUNT"),
    ("gpu-memory-utilization", "", "--cache-mib MIB, the memory for keys and values"),
    ("served-model-name", "serve", "--name NAME"),
    ("quantization", "", "--quantize int8, int4 or fp8"),
    ("load-in-8bit", "", "--quantize int8"),
    ("load-in-4bit", "", "--quantize int4"),
    ("max-tokens", "", "--tokens COUNT"),
    ("max-new-tokens", "", "--tokens COUNT"),
    ("n-predict", "", "--tokens COUNT"),
    ("temp", "", "--temperature NUMBER"),
];

/// Reads the words that the process was started with.
pub(crate) fn parse() -> Result<Cli, clap::Error> {
    let words = of_plan(std::env::args_os().collect());
    let mut command = command();
    let read = command.try_get_matches_from_mut(&words);
    let matches = read.map_err(|error| with_our_word(error, &words))?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// The commands, as they are read and shown.
pub(crate) fn command() -> Command {
    let command = both_spellings(Cli::command());
    let help = grouped_help(&command);
    command.help_template(help)
}

/// `plan estimate` and `plan pipeline` are commands of their own, which old scripts call `estimate` and `plan-pipeline`.
fn of_plan(mut words: Vec<OsString>) -> Vec<OsString> {
    let own = match (words.get(1).and_then(|word| word.to_str()), words.get(2).and_then(|word| word.to_str()))
    {
        (Some("plan"), Some("estimate")) => "estimate",
        (Some("plan"), Some("pipeline")) => "plan-pipeline",
        _ => return words,
    };
    words.splice(1..3, [OsString::from(own)]);
    words
}

/// Takes every long option with `-` and with `_`.
fn both_spellings(command: Command) -> Command {
    let command = command.mut_args(|arg: Arg| {
        let Some(long) = arg.get_long().map(str::to_owned) else { return arg };
        let known: Vec<String> =
            arg.get_all_aliases().unwrap_or_default().into_iter().map(str::to_owned).collect();
        let spellings = [long.replace('_', "-"), long.replace('-', "_")];
        let new = spellings.into_iter().filter(|spelling| *spelling != long && !known.contains(spelling));
        // Clap wants names that live as long as the process, which reads its words once.
        arg.aliases(new.map(|spelling| &*spelling.leak()).collect::<Vec<&'static str>>())
    });
    command.mut_subcommands(both_spellings)
}

/// Clap lists commands in one heap; here they are in the order of what somebody wants to do.
fn grouped_help(command: &Command) -> String {
    let mut text = String::from("{about-with-newline}\n{usage-heading} {usage}\n");
    for (group, names) in GROUPS {
        let _ = write!(text, "\n{group}:\n");
        for name in names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "  {name:<12} {about}");
        }
    }
    text + "\nOptions:\n{options}\n\n`ferrospeed help COMMAND` says more; docs/README.md finds the page for a task.\n"
}

/// Adds what an option is called here, where another program's name for it was given.
fn with_our_word(error: clap::Error, words: &[OsString]) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else { return error };
    let name = given.trim_start_matches('-').split('=').next().unwrap_or_default().replace('_', "-");
    let of = words.iter().skip(1).filter_map(|word| word.to_str()).find(|word| !word.starts_with('-'));
    let ours = ELSEWHERE
        .iter()
        .find(|(theirs, command, _)| *theirs == name && (command.is_empty() || Some(*command) == of));
    let Some((_, _, ours)) = ours else { return error };
    let text =
        format!("unexpected argument '{given}'; here it is {ours}\n\nFor more information, try '--help'.\n");
    clap::Error::raw(ErrorKind::UnknownArgument, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_shown_in_one_group() {
        let command = command();
        let mut shown: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let mut there: Vec<&str> = command
            .get_subcommands()
            .filter(|command| !command.is_hide_set() && command.get_name() != "help")
            .map(Command::get_name)
            .collect();
        shown.sort_unstable();
        there.sort_unstable();
        assert_eq!(shown, there);
        command.debug_assert();
    }

    #[test]
    fn what_plan_has_below_it_is_read_under_its_old_name_too() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert_eq!(
            of_plan(words("ferrospeed plan estimate --params 7e9")),
            words("ferrospeed estimate --params 7e9")
        );
        assert_eq!(of_plan(words("ferrospeed plan pipeline zb-v")), words("ferrospeed plan-pipeline zb-v"));
        assert_eq!(of_plan(words("ferrospeed plan recipe.toml")), words("ferrospeed plan recipe.toml"));
    }

    #[test]
    fn every_option_is_taken_in_both_spellings() {
        let read = |words: &[&str]| command().try_get_matches_from(words).map(|_| ());
        for option in ["--cache-mib=1", "--cache_mib=1", "--max-running=1", "--max_running=1"] {
            read(&["ferrospeed", "serve", "model", option]).unwrap();
        }
        for option in ["--fresh_optimizer", "--fresh-optimizer"] {
            read(&["ferrospeed", "train", "recipe.toml", "--resume", option]).unwrap();
        }
        read(&["ferrospeed", "plan", "ds_config.json", "--device-gib", "80", "--params", "7e9"]).unwrap();
    }

    #[test]
    fn an_option_of_another_program_is_answered_with_ours() {
        let said = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            with_our_word(command().try_get_matches_from(&words).unwrap_err(), &words).to_string()
        };
        let text = said(&["ferrospeed", "train", "recipe.toml", "--zero", "3"]);
        assert!(text.contains("'--zero'; here it is --set zero_optimization.stage=3"), "{text}");
        let text = said(&["ferrospeed", "serve", "model", "--max_model_len=10"]);
        assert!(text.contains("here it is --max-length TOKENS"), "{text}");
        assert!(!said(&["ferrospeed", "serve", "model", "--nonsense"]).contains("here it is"));
    }
}
