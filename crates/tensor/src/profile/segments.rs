//! Work as a timeline: which block it was in when.

use std::sync::Arc;
use std::time::Instant;

use super::Pass;

/// A stretch of time in one module: a block, or what lies beside blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// Its path; with the pass, where that is not forward.
    pub module: String,
    /// From.
    pub begin: Instant,
    /// To.
    pub end: Instant,
}

/// Stretches as they come; those of one block are one.
pub(super) struct Segments {
    most: usize,
    kept: Vec<(Arc<str>, Pass, Instant, Instant)>,
}

impl Segments {
    pub(super) fn new(most: usize) -> Segments {
        Segments { most, kept: Vec::new() }
    }

    pub(super) fn add(&mut self, path: &Arc<str>, pass: Pass, begin: Instant, end: Instant) {
        if let Some(last) = self.kept.last_mut()
            && last.1 == pass
            && coarse(&last.0) == coarse(path)
        {
            last.3 = end;
        } else if self.kept.len() < self.most {
            self.kept.push((path.clone(), pass, begin, end));
        }
    }

    /// What lies in modules, by their names.
    pub(super) fn named(self) -> Vec<Segment> {
        let named = |(path, pass, begin, end): (Arc<str>, Pass, Instant, Instant)| {
            let pass = match pass {
                Pass::Forward => "",
                Pass::Backward => " backward",
                Pass::Recomputation => " recomputed",
            };
            Segment { module: format!("{}{pass}", coarse(&path)), begin, end }
        };
        self.kept.into_iter().filter(|(path, ..)| !path.is_empty()).map(named).collect()
    }
}

/// The part of a path that ends with the number of a block; of one without a number, its first two names.
fn coarse(path: &str) -> &str {
    let is_number = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    let names = || path.split('.');
    let count = names().position(is_number).map_or(2, |place| place + 1);
    let length: usize = names().take(count).map(|name| name.len() + 1).sum();
    &path[..length.saturating_sub(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_cut_after_its_block() {
        for (path, cut) in [
            ("transformer.h.0.attn.query", "transformer.h.0"),
            ("transformer.wte", "transformer.wte"),
            ("model.embed.tokens.x", "model.embed"),
            ("0.1", "0"),
            ("lm_head", "lm_head"),
            ("", ""),
        ] {
            assert_eq!(coarse(path), cut);
        }
    }

    #[test]
    fn stretches_of_one_block_are_one_and_the_rest_is_bounded() {
        let mut segments = Segments::new(2);
        let now = Instant::now();
        for (path, pass) in [
            ("h.0.attn", Pass::Forward),
            ("h.0.mlp", Pass::Forward),
            ("h.0.mlp", Pass::Backward),
            ("h.1", Pass::Backward),
        ] {
            segments.add(&path.into(), pass, now, now);
        }
        let names: Vec<_> = segments.named().into_iter().map(|segment| segment.module).collect();
        assert_eq!(names, ["h.0", "h.0 backward"]);
    }
}
