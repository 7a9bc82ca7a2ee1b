//! What recipes name of the Hugging Face Hub, brought before a command looks at it; the terminal says how far it is.

use std::ops::ControlFlow;
use std::path::Path;

use ferrospeed_command::Failure;
use ferrospeed_command::hub::Teller;
use ferrospeed_command::terminal::print_note;
use ferrospeed_train::{FromHub, Recipe, StopRequests};

use super::train_start::{check_told_to_stop, failure};

/// Puts what lies here in place of a recipe's names.
pub(super) fn bring(recipe: &mut Recipe, path: &Path, what: FromHub) -> Result<(), Failure> {
    bring_until(recipe, path, what, &StopRequests::default())
}

/// The same for a run, which signals may end.
pub(super) fn bring_for_run(
    recipe: &mut Recipe,
    path: &Path,
    requests: &StopRequests,
) -> Result<(), Failure> {
    bring_until(recipe, path, FromHub::Everything, requests)
}

fn bring_until(
    recipe: &mut Recipe,
    path: &Path,
    what: FromHub,
    requests: &StopRequests,
) -> Result<(), Failure> {
    let mut teller = Teller::new();
    let brought = recipe.bring(path, what, &mut |progress| {
        teller.tell(progress);
        match requests.ending() {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    });
    check_told_to_stop(requests)?;
    brought.map_err(failure)?.iter().for_each(|note| print_note(note));
    Ok(())
}
