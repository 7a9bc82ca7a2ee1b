//! Tasks, asked: choices by how likely each is, answers by what the model writes.

use std::path::{Path, PathBuf};

use ferrospeed_text::{ChatTemplate, asked_text};

use crate::ask::{InOrder, Model, Pending};
use crate::case::{Case, Prompt, Question, read_cases};
use crate::error::{EvaluateError, Result};
use crate::report::{Outcome, Part, TaskShares, Verdict};

/// A task that is under way.
struct Asked {
    case: Case,
    /// Of choices, the tokens and bytes of each.
    sizes: Vec<[usize; 2]>,
    pending: Vec<Pending>,
}

pub(crate) fn run(model: &Model, path: &Path, files: &[PathBuf], template: &ChatTemplate) -> Result<Part> {
    // All of them are read before the first is asked: a mistake in the last line is told now.
    let cases = read_cases(files, path)?;
    let mut outcomes = Vec::with_capacity(cases.len());
    let mut tasks = TaskShares::default();
    let mut asked = InOrder::new(|asked: Asked| {
        outcomes.push(outcome(asked, &mut tasks)?);
        Ok(())
    });
    for case in cases {
        let unanswered = |why: String| EvaluateError::Unanswered {
            path: case.path.clone(),
            place: case.place.clone(),
            why,
        };
        let (sizes, pending) = ask(model, template, &case).map_err(unanswered)?;
        asked.add(Asked { case, sizes, pending })?;
    }
    asked.finish()?;
    for (share, of) in [
        (&mut tasks.accuracy, tasks.choices),
        (&mut tasks.accuracy_per_token, tasks.choices),
        (&mut tasks.accuracy_per_byte, tasks.choices),
        (&mut tasks.exact_match, tasks.exact),
    ] {
        *share /= of.max(1) as f64;
    }
    Ok(Part { path: path.to_path_buf(), kind: "tasks", tasks: Some(tasks), outcomes, ..Part::default() })
}

/// The text before an answer, and whether the tokenizer puts its own tokens around it: a template writes all of them.
fn before(template: &ChatTemplate, prompt: &Prompt) -> Result<(String, bool), String> {
    match prompt {
        Prompt::Text(text) => Ok((text.clone(), true)),
        Prompt::Messages(conversation) => {
            let text = asked_text(template, conversation).map_err(|error| error.to_string())?;
            Ok((text, false))
        }
    }
}

fn ask(
    model: &Model,
    template: &ChatTemplate,
    case: &Case,
) -> Result<(Vec<[usize; 2]>, Vec<Pending>), String> {
    let facts = model.facts();
    let (prompt, is_bare) = before(template, &case.prompt)?;
    match &case.question {
        Question::Choice { choices, .. } => {
            let (mut sizes, mut pending) = (Vec::new(), Vec::new());
            for choice in choices {
                let text = format!("{prompt}{choice}");
                let placed = facts.codec.encode_places(&text, is_bare).map_err(|error| error.to_string())?;
                // A token that is made of both counts to the choice.
                let from =
                    placed.iter().position(|(_, place)| place.end > prompt.len()).unwrap_or(placed.len());
                if from == 0 {
                    return Err("the tokenizer makes one token of the prompt and the beginning of a choice, and nothing predicts it; write a longer prompt".into());
                }
                let ids = facts.readable(placed.into_iter().map(|(token, _)| token).collect())?;
                sizes.push([ids.len() - from, choice.len()]);
                pending.push(model.score(ids, from));
            }
            Ok((sizes, pending))
        }
        Question::Exact { stops, max_tokens, .. } => {
            let ids = match is_bare {
                true => facts.codec.encode_prompt(&prompt),
                false => facts.codec.encode(&prompt),
            };
            let ids = facts.readable(ids.map_err(|error| error.to_string())?)?;
            let room = model.longest().saturating_sub(ids.len());
            if room == 0 {
                return Err(format!(
                    "its prompt has {} tokens, and the model has room for {}",
                    ids.len(),
                    model.longest()
                ));
            }
            Ok((Vec::new(), vec![model.write(ids, (*max_tokens).min(room), stops.clone())]))
        }
    }
}

fn outcome(asked: Asked, tasks: &mut TaskShares) -> Result<Outcome> {
    let Asked { case, sizes, pending } = asked;
    let Case { path, place, id, question, .. } = case;
    let unanswered =
        |why: String| EvaluateError::Unanswered { path: path.clone(), place: place.clone(), why };
    let said = format!("{}: {place}", path.display());
    match question {
        Question::Choice { choices, answer } => {
            let mut verdicts = Vec::with_capacity(choices.len());
            for ([tokens, bytes], pending) in sizes.into_iter().zip(pending) {
                let logprobs = pending.scores().map_err(unanswered)?;
                let logprob = logprobs.iter().map(|&logprob| f64::from(logprob)).sum();
                verdicts.push(Verdict { logprob, tokens, bytes });
            }
            let given = likeliest(&verdicts, |verdict| verdict.logprob);
            let per_token = likeliest(&verdicts, |verdict| verdict.logprob / verdict.tokens.max(1) as f64);
            let per_byte = likeliest(&verdicts, |verdict| verdict.logprob / verdict.bytes.max(1) as f64);
            tasks.choices += 1;
            let right = |found: usize| f64::from(u8::from(found == answer));
            tasks.accuracy += right(given);
            tasks.accuracy_per_token += right(per_token);
            tasks.accuracy_per_byte += right(per_byte);
            Ok(Outcome {
                place: said,
                id,
                expected: choices[answer].clone(),
                given: choices[given].clone(),
                is_right: given == answer,
                choices: verdicts,
            })
        }
        Question::Exact { answers, .. } => {
            let mut written = String::new();
            for pending in pending {
                written += &pending.text().map_err(unanswered)?;
            }
            let given = written.trim().to_owned();
            let is_right = answers.iter().any(|answer| answer.trim() == given);
            tasks.exact += 1;
            tasks.exact_match += f64::from(u8::from(is_right));
            let expected = answers.join(" | ");
            Ok(Outcome { place: said, id, expected, given, is_right, choices: Vec::new() })
        }
    }
}

/// The first among equals.
fn likeliest(verdicts: &[Verdict], by: impl Fn(&Verdict) -> f64) -> usize {
    (0..verdicts.len()).fold(0, |best, at| if by(&verdicts[at]) > by(&verdicts[best]) { at } else { best })
}
