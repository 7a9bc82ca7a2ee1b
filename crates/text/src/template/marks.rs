//! `{% generation %}` … `{% endgeneration %}`: what a template says the assistant has written. transformers knows these as
//! blocks; here they become calls that note how much text there is, at the same place, so that blanks around them go as before.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::Value;

const BEGINS: (&str, &str) = ("generation", "__generation_begins");
const ENDS: (&str, &str) = ("endgeneration", "__generation_ends");

/// A template's source with calls in place of its marks.
pub(super) fn readable(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, block) = rest.split_at(start);
        out.push_str(before);
        let end = block.find("%}").map_or(block.len(), |end| end + 2);
        let (block, behind) = block.split_at(end);
        let inner = block.trim_start_matches("{%").trim_end_matches("%}").trim_start_matches(['-', '+']);
        let name = inner.trim_end_matches(['-', '+']).trim();
        match [BEGINS, ENDS].into_iter().find(|(known, _)| *known == name) {
            Some((known, call)) => out.push_str(&block.replacen(known, &format!("do {call}()"), 1)),
            None => out.push_str(block),
        }
        rest = behind;
    }
    out + rest
}

/// Notes where marked text begins and ends while a template writes.
#[derive(Debug, Default, Clone)]
pub(super) struct Marks(Arc<Mutex<Noted>>);

#[derive(Debug, Default)]
struct Noted {
    written: usize,
    begun: Option<usize>,
    spans: Vec<Range<usize>>,
}

impl Marks {
    /// So much text there is now.
    pub(super) fn written(&self, bytes: usize) {
        self.with(|noted| noted.written = bytes);
    }

    /// What the template's calls lead to.
    pub(super) fn functions(&self) -> Value {
        let (begins, ends) = (self.clone(), self.clone());
        let begin = move || begins.with(|noted| noted.begun = Some(noted.written));
        let end = move || {
            ends.with(|noted| {
                let begun = noted.begun.take().unwrap_or(noted.written);
                noted.spans.push(begun..noted.written);
            });
        };
        Value::from_iter([
            (
                BEGINS.1,
                Value::from_function(move || -> bool {
                    begin();
                    true
                }),
            ),
            (
                ENDS.1,
                Value::from_function(move || -> bool {
                    end();
                    true
                }),
            ),
        ])
    }

    pub(super) fn spans(&self) -> Vec<Range<usize>> {
        self.with(|noted| std::mem::take(&mut noted.spans))
    }

    fn with<R>(&self, act: impl FnOnce(&mut Noted) -> R) -> R {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_calls_and_all_else_stays() {
        let source =
            "{%- if generation %}{%- generation -%}\nx{% endgeneration %}{{ 'generation' }}{% endif %}{%";
        let expected = "{%- if generation %}{%- do __generation_begins() -%}\nx{% do __generation_ends() %}{{ 'generation' }}{% endif %}{%";
        assert_eq!(readable(source), expected);
    }
}
