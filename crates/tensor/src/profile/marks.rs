//! Times by the clock of a device: a mark in its work at every change of module, read when all is done.
//!
//! Nobody waits for the device meanwhile, so that it runs as it does unobserved. Marks are bounded: when there are many, the
//! device is waited for once and they are read.

use std::sync::Arc;
use std::time::Duration;

use super::{Pass, Profile};
use crate::backend::{Device, Mark};

/// Marks before they are read.
const MOST: usize = 1 << 14;

/// Stretches of a device's work, and whose they are.
pub(super) struct Marks {
    device: Device,
    last: Option<Mark>,
    stretches: Vec<(Arc<str>, Pass, Mark)>,
}

impl Marks {
    /// Begins to measure; `None` on a device without a clock of its own.
    pub(super) fn begin(device: &Device) -> Option<Marks> {
        let last = device.backend().mark().ok().flatten()?;
        Some(Marks { device: device.clone(), last: Some(last), stretches: Vec::new() })
    }

    /// Ends a stretch, which was of this module and pass. A failing device tells the op that waits for it; here it would only
    /// spoil a time.
    pub(super) fn end(&mut self, path: Arc<str>, pass: Pass, profile: &mut Profile) {
        if let Ok(Some(mark)) = self.device.backend().mark() {
            self.stretches.push((path, pass, mark));
        }
        if self.stretches.len() >= MOST {
            self.settle(profile);
        }
    }

    /// Waits for the device, and gives all stretches to their modules.
    pub(super) fn settle(&mut self, profile: &mut Profile) {
        let backend = self.device.backend();
        let _ = backend.synchronize();
        for (path, pass, mark) in self.stretches.drain(..) {
            if let Some(before) = self.last.replace(mark) {
                let after = self.last.as_ref().expect("it was just put there");
                let seconds = backend.seconds_between(&before, after).unwrap_or(0.0);
                let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
                profile.module(&path).own.of(pass).time += time;
                backend.unmark(before);
            }
        }
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        let rest = self.stretches.drain(..).map(|(_, _, mark)| mark);
        self.last.take().into_iter().chain(rest).for_each(|mark| self.device.backend().unmark(mark));
    }
}
