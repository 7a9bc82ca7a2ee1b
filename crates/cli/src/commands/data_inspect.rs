//! `ferrospeed data inspect`: samples as the model sees them, what of them is learnt, how long they are, and what became of those
//! that are too long.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_train::{FromHub, Inspection, Recipe, Shown, inspect};

use super::from_hub;
use super::train_start::failure;
use crate::progress::grouped;
use ferrospeed_command::Failure;
use ferrospeed_command::terminal::{Colour, Paint, print_output};

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The recipe (TOML) whose data.samples are meant
    recipe: PathBuf,
    /// How many samples to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    count: usize,
    /// Change a key of the recipe, as `train` does; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode, Failure> {
    let mut recipe = Recipe::load(&args.recipe, &args.overrides).map_err(failure)?;
    from_hub::bring(&mut recipe, &args.recipe, FromHub::Everything)?;
    let found = inspect(&recipe, &args.recipe, args.count).map_err(failure)?;
    print_output(&as_text(&found, Paint::for_stdout()))?;
    Ok(ExitCode::SUCCESS)
}

fn as_text(found: &Inspection, paint: Paint) -> String {
    let legend = if paint.is_on() { paint.paint(Colour::Green, "learnt") } else { "[[learnt]]".into() };
    let mut out = format!("samples of the kind '{}'; {legend} is what the loss counts\n", found.kind);
    for (index, sample) in found.shown.iter().enumerate() {
        let [tokens, learnt] = sample.tokens.map(|count| grouped(count as u64));
        out +=
            &format!("\nsample {}: {tokens} tokens, {learnt} learnt\n{}\n", index + 1, marked(sample, paint));
    }
    out + "\n" + &lengths(found) + &what_became(found)
}

fn marked(sample: &Shown, paint: Paint) -> String {
    let stretches = sample.stretches.iter().map(|(text, learnt)| match (learnt, paint.is_on()) {
        (false, _) => text.clone(),
        (true, true) => paint.paint(Colour::Green, text),
        (true, false) => format!("[[{text}]]"),
    });
    stretches.collect()
}

/// Marks of a bar at most.
const BAR: u64 = 40;

/// How many samples have how many tokens, by powers of two.
fn lengths(found: &Inspection) -> String {
    let bin = |length: u64| length.max(1).next_power_of_two();
    let (Some(&least), Some(&most)) = (found.lengths.iter().min(), found.lengths.iter().max()) else {
        return String::new();
    };
    let bins =
        std::iter::successors(Some(bin(least)), |end| Some(end * 2)).take_while(|&end| end <= bin(most));
    let counted: Vec<(u64, u64)> = bins
        .map(|end| (end, found.lengths.iter().filter(|&&length| bin(length) == end).count() as u64))
        .collect();
    let highest = counted.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1);
    let line = |&(end, count): &(u64, u64)| {
        let bar = "#".repeat((count * BAR).div_ceil(highest) as usize);
        format!("  up to {:>9} tokens {:>9}  {bar}\n", grouped(end), grouped(count))
    };
    counted.iter().map(line).collect()
}

fn what_became(found: &Inspection) -> String {
    let counted = &found.counted;
    let [samples, tokens, trained, filling] =
        [counted.samples, counted.tokens, counted.trained, counted.filling].map(grouped);
    let mut out = format!(
        "{samples} samples in sequences of {} tokens: {tokens} tokens, {trained} learnt, {filling} to fill sequences\n",
        grouped(found.sequence)
    );
    if counted.too_long > 0 {
        out += &format!(
            "{} samples are longer than a sequence (data.too_long = \"{}\")\n",
            grouped(counted.too_long),
            found.too_long
        );
    }
    if counted.dropped > 0 {
        out += &format!(
            "{} samples are left out: they are too long, or nothing that is learnt is left of them\n",
            grouped(counted.dropped)
        );
    }
    out
}
