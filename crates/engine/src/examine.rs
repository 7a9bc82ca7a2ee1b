//! What keeps an engine from being made, found before any rank begins: by whoever looks at a run without starting it.
//!
//! These are the checks of [`initialize_model`](crate::initialize_model) itself, so that both say the same.

use ferrospeed_config::Config;
use ferrospeed_nn::Parameters;
use ferrospeed_optim::schedule::Scheduler;

use crate::communication::logged_operations;
use crate::compression::{self, compression};
use crate::eigenvalues::Eigenvalues;
use crate::error::{EngineError, Result};
use crate::features::Features;
use crate::setup::{configured_optimizer, model_type};

/// Everything that an engine would refuse in a configuration: of a model where there is one, trained as the configuration alone
/// says. Without, a program may have an optimizer and groups of parameters of its own.
pub fn refusals(config: &Config, model: Option<&Parameters>) -> Vec<EngineError> {
    let mut checked = vec![logged_operations(config).map(drop), Features::from_config(config).map(drop)];
    match model {
        Some(model) => checked.push(compression::plan(config, model.as_slice()).map(drop)),
        None => checked.push(compression(config).map(drop)),
    }
    if let Some(model) = model {
        checked.push(check_scheduler(config));
        checked.push(Eigenvalues::of_run(config, model_type(config), model.as_slice()).map(drop));
    }
    checked.into_iter().filter_map(Result::err).collect()
}

/// Refuses an optimizer that does not run, and a schedule that does not suit it.
fn check_scheduler(config: &Config) -> Result<()> {
    let (Some((rule, options)), Some(scheduler)) = (configured_optimizer(config)?, &config.scheduler) else {
        return Ok(());
    };
    Ok(Scheduler::from_config(scheduler, &rule, &[options]).map(drop)?)
}
