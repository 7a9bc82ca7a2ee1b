//! What happens before a rank computes, once for the whole run: the recipe is looked at, memory is counted, and the folder is
//! taken and cleared.
//!
//! `ferrospeed train` does it and then starts its ranks. Where `mpirun`, `srun` or another launcher started them, rank 0 does
//! it, the first rank of every host counts that host's memory, and nobody goes on before all have heard that all is well. Who
//! took the folder keeps it until the run has ended, and gives an earlier run back where this one took no step.

use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use ferrospeed_comm::World;
use ferrospeed_command::Failure;
use ferrospeed_command::terminal::{print_note, print_progress};
use ferrospeed_command::writable::impossible;
use ferrospeed_train::{
    DataError, Ending, FolderLock, Preparing, Recipe, RunFolder, StopRequests, TrainError, report_failure,
};
use serde_json::Value;

use super::offload_folders::{check_folders_to_make, check_offload_folders};
use super::output_file::check_place;
use super::outputs;
use super::train::{TrainArgs, exit_code};
use super::{train_memory, train_room};
use crate::progress::grouped;

/// How a timeline of ours begins.
const TRACE_BEGINS: &[u8] = b"{\"displayTimeUnit\"";
/// More processes than this are a slip of the finger.
const MAX_RANKS_OF_HOST: u32 = 1024;

/// For ranks that this process will start, or be: gives the folder of the run and the right to it.
pub(super) fn begin(
    args: &TrainArgs,
    recipe: &Recipe,
    folder: RunFolder,
    requests: &StopRequests,
) -> Result<(RunFolder, FolderLock), Failure> {
    let folder = own_folder(args, folder)?;
    // A run that cannot be leaves no folder behind.
    let before = Before::of(&folder);
    let begun = look_and_take(args, recipe, &folder, requests);
    begun.map_err(|failure| before.restored(&folder, failure)).map(|lock| (folder, lock))
}

fn look_and_take(
    args: &TrainArgs,
    recipe: &Recipe,
    folder: &RunFolder,
    requests: &StopRequests,
) -> Result<FolderLock, Failure> {
    let model = look_ahead(args, recipe, folder, requests)?;
    if recipe.ranks > MAX_RANKS_OF_HOST {
        let why = format!(
            "{} ranks are too many for one host: at most {MAX_RANKS_OF_HOST}; set ranks in the recipe or give -n",
            recipe.ranks
        );
        return Err(Failure::Usage(why));
    }
    if !args.force {
        train_memory::check(recipe, &model, args.device(), u64::from(recipe.ranks))?;
    }
    train_room::check(args, recipe, &model, folder)?;
    // What was asked for meanwhile holds before anything of an earlier run is put away.
    check_told_to_stop(requests)?;
    take(args, recipe, folder)
}

/// Refuses to begin what was told to stop.
pub(super) fn check_told_to_stop(requests: &StopRequests) -> Result<(), Failure> {
    requests.ending().map_or(Ok(()), |ending| Err(stopped_before(ending)))
}

/// The end of a run that was told to stop before it had begun.
pub(super) fn stopped_before(ending: Ending) -> Failure {
    let text = "told to stop before its ranks had begun; nothing was trained, and nothing is lost";
    Failure::Stopped(exit_code(ending), text.to_owned())
}

/// What of a folder was there before a run began to look at its data.
struct Before {
    folder: bool,
    data: bool,
}

impl Before {
    fn of(folder: &RunFolder) -> Before {
        Before { folder: folder.path().exists(), data: folder.data().exists() }
    }

    /// Takes away what was made for a run that was refused, unless another run has the folder by now.
    fn restored(&self, folder: &RunFolder, failure: Failure) -> Failure {
        if self.data || !folder.data().exists() {
            return failure;
        }
        if let Ok(lock) = folder.lock() {
            // The refusal is what is reported.
            let _ = std::fs::remove_dir_all(folder.data());
            if !self.folder {
                folder.remove_if_empty(lock);
            }
        }
        failure
    }
}

/// For ranks that another launcher started; all of them call it. Rank 0 gets the right to the folder.
pub(super) fn begin_together(
    args: &TrainArgs,
    recipe: &Recipe,
    folder: &RunFolder,
    world: &World,
) -> Result<Option<FolderLock>, Failure> {
    let leads = world.rank() == 0;
    let before = leads.then(|| Before::of(folder));
    let begun = look_together(args, recipe, folder, world);
    begun.map_err(|failure| match &before {
        Some(before) => before.restored(folder, failure),
        None => failure,
    })
}

fn look_together(
    args: &TrainArgs,
    recipe: &Recipe,
    folder: &RunFolder,
    world: &World,
) -> Result<Option<FolderLock>, Failure> {
    let leads = world.rank() == 0;
    let looked = if leads { look_at_folder(args, recipe, folder) } else { Ok(()) };
    all_well(world, looked)?;
    let fits = match world.local_rank() {
        0 if !args.force => fits_here(args, recipe, world),
        _ => Ok(()),
    };
    all_well(world, fits)?;
    let room = leads.then(|| {
        let model = ferrospeed_train::model_config(recipe, args.recipe()).map_err(failure)?;
        train_room::check(args, recipe, &model, folder)
    });
    all_well(world, room.unwrap_or(Ok(())))?;
    let taken = if leads { take(args, recipe, folder).map(Some) } else { Ok(None) };
    all_well(world, taken)
}

/// What the folder holds, and the recipe.
fn look_at_folder(args: &TrainArgs, recipe: &Recipe, folder: &RunFolder) -> Result<(), Failure> {
    recover(folder)?;
    let is_new = args.resume.is_none() && !args.overwrite;
    let free = if is_new { folder.check_unused() } else { folder.check_free() };
    free.map_err(failure)?;
    // Who waits for signals ends the process meanwhile.
    look_ahead(args, recipe, folder, &StopRequests::default()).map(drop)
}

fn fits_here(args: &TrainArgs, recipe: &Recipe, world: &World) -> Result<(), Failure> {
    let model = ferrospeed_train::model_config(recipe, args.recipe()).map_err(failure)?;
    let here = world.hosts().iter().find(|ranks| ranks.contains(&world.rank())).map_or(1, Vec::len);
    train_memory::check(recipe, &model, args.device(), here as u64)
}

/// Goes on where all ranks do. One that cannot says why; the others say who that is.
fn all_well<T>(world: &World, own: Result<T, Failure>) -> Result<T, Failure> {
    let mut verdicts = vec![0u8; world.size()];
    let verdict = own.as_ref().err().map_or(0, Failure::exit_code);
    let gathered = world.group().all_gather(&[verdict], &mut verdicts);
    let value = match (own, &gathered) {
        // Who was cut off never hears this verdict and ends with the code of a lost peer; so do all.
        (Err(own), Err(_)) => return Err(Failure::Run(own.to_string())),
        (own, _) => own?,
    };
    gathered.map_err(|error| Failure::Run(error.to_string()))?;
    let Some(rank) = verdicts.iter().position(|verdict| *verdict != 0) else { return Ok(value) };
    // A launcher gives the code of whichever rank ends first, so all have the same.
    Err(Failure::with_code(verdicts[rank], format!("the run does not start: rank {rank} says why")))
}

/// Takes the folder, and puts away what an earlier run has left where this one is to replace it.
fn take(args: &TrainArgs, recipe: &Recipe, folder: &RunFolder) -> Result<FolderLock, Failure> {
    let lock = folder.lock().map_err(failure)?;
    if args.overwrite {
        keep_own_model(recipe, folder)?;
        folder.set_aside().map_err(failure)?;
    }
    Ok(lock)
}

/// After the ranks have ended, by who holds the folder: writes down a failure, for those who watch the run.
pub(super) fn conclude(
    folder: &RunFolder,
    name: &str,
    outcome: Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    // Ranks may not have lived to do so.
    if let Err(failure @ (Failure::Run(_) | Failure::Usage(_))) = &outcome {
        report_failure(folder, name, &failure.to_string());
    }
    settle(folder);
    outcome
}

/// A run cannot replace the model that it starts from.
fn keep_own_model(recipe: &Recipe, folder: &RunFolder) -> Result<(), Failure> {
    let Some(path) = &recipe.model.path else { return Ok(()) };
    let inside = |folder: &Path| {
        let (path, folder) = (path.canonicalize(), folder.canonicalize());
        matches!((path, folder), (Ok(path), Ok(folder)) if path.starts_with(&folder))
    };
    if inside(&folder.model()) || inside(&folder.checkpoints()) {
        let why = format!(
            "model.path: {} lies in the folder that --overwrite replaces; choose another --out",
            path.display()
        );
        return Err(Failure::Usage(why));
    }
    Ok(())
}

/// Gives the earlier run back where this one has failed before its first step.
fn settle(folder: &RunFolder) {
    let waits = folder.is_being_replaced();
    match folder.settle() {
        Ok(()) if waits => {
            print_note(&format!(
                "{}: no step was taken, and the earlier run is as it was",
                folder.path().display()
            ));
        }
        Ok(()) => {}
        Err(error) => print_note(&format!("the earlier run could not be put back: {error}")),
    }
}

/// Where a run that was to replace another was killed.
fn recover(folder: &RunFolder) -> Result<(), Failure> {
    if folder.path().exists() && !folder.path().is_dir() {
        let why = "is no folder, and a run needs one for its files; choose another --out";
        return Err(Failure::Usage(format!("{} {why}", folder.path().display())));
    }
    if let Some(why) = impossible(folder.path()) {
        return Err(Failure::Usage(format!("--out: {why}")));
    }
    if let Err(error) = ferrospeed_files::expect_own_links(folder.path()) {
        return Err(Failure::Run(format!("--out: {}: {error}", folder.path().display())));
    }
    if let Some(run) = folder.enclosing_run() {
        let (inside, run) = (folder.path().display(), run.path().display());
        let why = format!(
            "{inside} lies among the files of the run in {run}, which replaces and removes them; choose another --out"
        );
        return Err(Failure::Usage(why));
    }
    if folder.is_being_replaced() {
        let _lock = folder.lock().map_err(failure)?;
        settle(folder);
    }
    Ok(())
}

/// The folder the run may use: a new run does not write over an old one's log and weights.
fn own_folder(args: &TrainArgs, folder: RunFolder) -> Result<RunFolder, Failure> {
    recover(&folder)?;
    let busy = folder.check_free();
    let goes_on = args.resume.is_some() && (args.out.is_some() || !args.resume().is_elsewhere(&folder));
    if goes_on || args.overwrite || !folder.holds_run() {
        return busy.map(|()| folder).map_err(failure);
    }
    if args.out.is_some() {
        return folder.check_unused().map(|()| folder).map_err(failure);
    }
    let (there, what) = match busy {
        Ok(()) => {
            ("an earlier run", " (--resume goes on with the earlier one, --overwrite replaces it)".to_owned())
        }
        Err(TrainError::Busy { holder, .. }) => {
            ("a run that is going on", format!(" ({holder}, has the other)"))
        }
        Err(error) => return Err(failure(error)),
    };
    let free = folder.or_next_free();
    print_note(&format!(
        "{} holds {there}: this one goes to {}{what}",
        folder.path().display(),
        free.path().display()
    ));
    Ok(free)
}

/// Ranks look again; a mistake is said once, before any of them begins, and text becomes tokens once.
fn look_ahead(
    args: &TrainArgs,
    recipe: &Recipe,
    folder: &RunFolder,
    requests: &StopRequests,
) -> Result<Value, Failure> {
    let checked = ferrospeed_train::check(recipe, args.recipe(), folder, &mut tell_preparing(requests));
    if let Err(TrainError::Data(DataError::Stopped)) = &checked {
        check_told_to_stop(requests)?;
    }
    let model = checked.map_err(failure)?;
    check_besides_data(recipe, Some(&model))?;
    if let Ok((config, _)) = recipe.config() {
        check_folders_to_make(&config)?;
    }
    if args.overwrite {
        return Ok(model);
    }
    let start = args.resume().find(folder, &recipe.name).map_err(failure)?;
    start.check_model(&model).map_err(failure)?;
    if args.resume.is_some() && start.candidates.is_empty() {
        // A run that has ended cannot be made again from what it left.
        if folder.holds_weights() {
            let why = "holds a run that has ended and no checkpoint to go on from";
            return Err(Failure::Run(format!(
                "{} {why}; give another --out, or --overwrite to replace it (its weights can be trained further: model.path)",
                folder.path().display()
            )));
        }
        let folder = folder.checkpoints();
        print_note(&format!("{}: no checkpoint yet, so the run starts at step 1", folder.display()));
    }
    Ok(model)
}

/// Refuses what keeps a recipe from running, beside its data and its model.
pub(super) fn check_besides_data(recipe: &Recipe, model: Option<&Value>) -> Result<(), Failure> {
    let problems = besides_data(recipe, model);
    if problems.is_empty() { Ok(()) } else { Err(Failure::Usage(problems.join("\n"))) }
}

/// Everything that keeps a recipe from running, beside its data and its model: places where it is to write.
pub(super) fn besides_data(recipe: &Recipe, model: Option<&Value>) -> Vec<String> {
    let text = |checked: Result<(), Failure>| checked.err().map(|failure| failure.to_string());
    let slots = model.and_then(|model| text(train_memory::check_slots(recipe, model)));
    let trace = recipe.trace.as_deref().and_then(|trace| text(check_trace(trace)));
    let cache = recipe.data.cache.as_deref().and_then(impossible);
    let named =
        [slots, trace.map(|why| format!("trace: {why}")), cache.map(|why| format!("data.cache: {why}"))];
    let offload = recipe.config().ok().and_then(|(config, _)| text(check_offload_folders(&config)));
    let monitors = recipe.unresolved().map_or_else(|_| Vec::new(), |(read, ..)| outputs::problems(&read));
    named.into_iter().flatten().chain(offload).chain(monitors).collect()
}

/// Refuses a place where no timeline can be, and one where something else is: another run's log, say.
fn check_trace(trace: &Path) -> Result<(), Failure> {
    if trace.as_os_str().is_empty() {
        return Err(Failure::Usage("is empty; name a file, or leave it out".into()));
    }
    check_place(trace)?;
    let mut beginning = Vec::new();
    if let Ok(file) = std::fs::File::open(trace) {
        // What cannot be read is not known to be a timeline either.
        let _ = file.take(TRACE_BEGINS.len() as u64).read_to_end(&mut beginning);
    }
    match !TRACE_BEGINS.starts_with(&beginning) {
        true => Err(Failure::Usage(format!(
            "{} is there and is no timeline, so it is not written over; name another file, or remove it",
            trace.display()
        ))),
        false => Ok(()),
    }
}

/// A line whenever another tenth of a text that is not small became tokens; it stops where signals ask for it.
pub(super) fn tell_preparing(requests: &StopRequests) -> impl FnMut(Preparing) -> ControlFlow<()> {
    const WORTH_TELLING_BYTES: u64 = 32 << 20;
    let mut told = 0;
    move |now| {
        let tenths = now.bytes * 10 / now.total_bytes.max(1);
        if now.total_bytes >= WORTH_TELLING_BYTES && tenths > told {
            told = tenths;
            print_progress(&format!(
                "text to tokens: {} %, {} of {} MiB, {} tokens",
                tenths * 10,
                now.bytes >> 20,
                now.total_bytes >> 20,
                grouped(now.tokens)
            ));
        }
        if requests.ending().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// A mistake of the user, or a run that failed.
pub(super) fn failure(error: TrainError) -> Failure {
    match error {
        TrainError::Recipe { .. }
        | TrainError::Occupied { .. }
        | TrainError::Used { .. }
        | TrainError::NoFolderOfItsOwn { .. }
        | TrainError::AnotherRun { .. }
        | TrainError::Undoes { .. }
        | TrainError::AnotherModel { .. } => Failure::Usage(error.to_string()),
        TrainError::StoppedAtOnce(ending) => Failure::Stopped(exit_code(ending), error.to_string()),
        TrainError::Checkpoint(error) => error.into(),
        other => Failure::Run(other.to_string()),
    }
}

/// Refuses to train where a rank was given another recipe or folder than rank 0; that rank says what differs.
pub(super) fn same_on_all(world: &World, recipe: &Recipe, folder: &RunFolder) -> Result<(), Failure> {
    let failed = |error: ferrospeed_comm::Error| Failure::Run(error.to_string());
    let mut own = serde_json::to_value(recipe).unwrap_or_default();
    if let Some(own) = own.as_object_mut() {
        // What ranks make of it counts, not how it is written. One that cannot be used is told of later.
        if let Ok((config, _)) = recipe.config() {
            own.insert("ds_config".to_owned(), config.to_json());
        }
        own.insert("--out".to_owned(), folder.path().display().to_string().into());
    }
    let mut theirs = own.to_string().into_bytes();
    let mut length = [theirs.len() as i64];
    world.group().broadcast(&mut length, 0).map_err(failed)?;
    theirs.resize(usize::try_from(length[0]).unwrap_or(0), 0);
    world.group().broadcast(&mut theirs, 0).map_err(failed)?;
    let theirs: Value = serde_json::from_slice(&theirs).unwrap_or_default();
    let same = match first_difference("", &own, &theirs) {
        None => Ok(()),
        Some((key, [here, there])) => Err(Failure::Usage(format!(
            "rank {} and rank 0 were given different runs: {key} is {here} here and {there} there; give all ranks the same recipe and options",
            world.rank()
        ))),
    };
    all_well(world, same)
}

/// The first key whose values differ, and both.
fn first_difference(at: &str, one: &Value, other: &Value) -> Option<(String, [String; 2])> {
    let (Some(ones), Some(others)) = (one.as_object(), other.as_object()) else {
        // 1 and 1.0 say the same.
        let is_same = one == other || one.as_f64().is_some_and(|one| other.as_f64() == Some(one));
        return (!is_same).then(|| (at.to_owned(), [one.to_string(), other.to_string()]));
    };
    let null = Value::Null;
    ones.keys().chain(others.keys()).find_map(|key| {
        let below = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        first_difference(&below, ones.get(key).unwrap_or(&null), others.get(key).unwrap_or(&null))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn who_cannot_say_to_the_others_why_it_does_not_start_ends_as_they_do() {
        let mut worlds = World::threads(2);
        drop(worlds.pop());
        let own: Result<(), Failure> = Err(Failure::Usage("the recipe is wrong".into()));
        let failure = all_well(&worlds[0], own).unwrap_err();
        assert_eq!((failure.exit_code(), failure.to_string().as_str()), (1, "the recipe is wrong"));
        let alone: Result<(), Failure> = Err(Failure::Usage("the recipe is wrong".into()));
        assert_eq!(all_well(&World::solo(), alone).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn a_rank_with_another_recipe_is_told_the_key_that_differs() {
        let recipe = |sequence: u64| json!({"steps": 3, "data": {"text": ["a"], "sequence": sequence}});
        assert_eq!(first_difference("", &recipe(8), &recipe(8)), None);
        let told = first_difference("", &recipe(8), &recipe(32)).unwrap();
        assert_eq!(told, ("data.sequence".to_owned(), ["8".to_owned(), "32".to_owned()]));
        let (key, values) = first_difference("", &recipe(8), &json!({"steps": 3, "save": {}})).unwrap();
        assert_eq!((key.as_str(), values[1].as_str()), ("data", "null"));
    }
}
