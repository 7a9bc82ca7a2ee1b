//! The `comms_logger` section: what ranks said to each other, how long it took, and who waited for whom.

use ferrospeed_comm::logger::{LogOptions, kind_named, straggler_table, table};
use ferrospeed_comm::{Kind, World, tell};
use ferrospeed_config::Config;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// The operations that `comms_logger.prof_ops` names, by our names or DeepSpeed's.
pub(crate) fn logged_operations(config: &Config) -> Result<Vec<Kind>> {
    let names = config.comms_logger.as_ref().map_or(&[][..], |section| &section.prof_ops);
    let kind = |name: &String| {
        kind_named(name).ok_or_else(|| EngineError::Argument {
            what: "comms_logger.prof_ops",
            why: format!("'{name}' is no operation; there are {}", Kind::ALL.map(Kind::name).join(", ")),
        })
    };
    names.iter().map(kind).collect()
}

/// Begins to count what the configuration asks for.
pub(crate) fn start(config: &Config, world: &World) -> Result<()> {
    let Some(section) = &config.comms_logger else { return Ok(()) };
    let named = logged_operations(config)?;
    world.log().start_with(LogOptions {
        only: (!section.prof_all).then_some(named),
        verbose: section.verbose,
        by_caller: section.debug,
    });
    Ok(())
}

impl Engine {
    /// What `comms_logger` counted on this rank, as a table. With `show_straggler` a second one says how much of it was the
    /// wait for slower ranks; then all ranks ask together.
    pub fn communication_summary(&self, show_straggler: bool) -> Result<String> {
        let log = self.world.log();
        if !show_straggler {
            return Ok(table(&log.summary()));
        }
        let rows = log.summary_across(&self.world.group())?;
        Ok(table(&rows) + &straggler_table(&rows))
    }

    /// Logs [`Engine::communication_summary`] on rank 0: DeepSpeed's `log_summary`. All ranks call it together.
    pub fn log_summary(&self, show_straggler: bool) -> Result<()> {
        let text = self.communication_summary(show_straggler)?;
        if self.world.rank() == 0 {
            tell(&format!("communication\n{text}"));
        }
        Ok(())
    }
}
