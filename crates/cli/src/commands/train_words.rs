//! A run as words of a command line: for the ranks that `train` starts, and for whoever goes on with it.

use ferrospeed_launch::shell;
use ferrospeed_train::{Recipe, RunFolder};

use super::train::TrainArgs;

/// What each rank of a run is started with.
pub(super) fn of_ranks(args: &TrainArgs, recipe: &Recipe, folder: &RunFolder) -> Vec<String> {
    let mut words = vec!["train".to_owned(), args.recipe().display().to_string()];
    words.extend(["--out".to_owned(), folder.path().display().to_string()]);
    words.extend(args.words_of_place(recipe.ranks));
    words.extend(args.measure_observing.then(|| "--measure_observing".to_owned()));
    words.extend(trace(args));
    words.extend(args.experiment.then(|| "--experiment".to_owned()));
    words.extend(args.resume.iter().map(|from| format!("--resume={from}")));
    words.extend(args.fresh_optimizer.then(|| "--fresh_optimizer".to_owned()));
    words.extend(args.overrides().into_iter().flat_map(set));
    words
}

/// The whole command that goes on with the run in a folder, from its newest checkpoint, up to so many steps where another number
/// of them is given. `ranks` are those to start; none are where another launcher starts them.
pub(super) fn to_go_on(
    args: &TrainArgs,
    folder: &RunFolder,
    ranks: Option<u32>,
    steps: Option<u64>,
) -> String {
    let mut words = vec!["ferrospeed".to_owned(), "train".to_owned(), args.recipe().display().to_string()];
    words.extend(["--resume".to_owned(), folder.path().display().to_string()]);
    words.extend(ranks.into_iter().flat_map(|ranks| ["-n".to_owned(), ranks.to_string()]));
    let device = args.device().to_string();
    words.extend((device != "auto").then(|| ["--device".to_owned(), device]).into_iter().flatten());
    words.extend(trace(args));
    words.extend(args.force.then(|| "--force".to_owned()));
    let kept = |assignment: &String| steps.is_none() || !assignment.starts_with("steps=");
    words.extend(args.overrides().into_iter().filter(kept).flat_map(set));
    words.extend(steps.into_iter().flat_map(|steps| set(format!("steps={steps}"))));
    shell::join(&words)
}

fn set(assignment: String) -> [String; 2] {
    ["--set".to_owned(), assignment]
}

fn trace(args: &TrainArgs) -> impl Iterator<Item = String> {
    args.trace.iter().flat_map(|file| ["--trace".to_owned(), file.display().to_string()])
}
