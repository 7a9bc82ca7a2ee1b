//! Tasks in a form of our own: a line of JSON each, a question with choices or with one answer.
//!
//! ```json
//! {"prompt": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
//! {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
//! ```
//!
//! The text of a choice follows the prompt as it is written, blank and all. `answer` is the number of a choice, from 0, or the text that
//! is expected, or several of which any will do. `id` names a task; `stop` and `max_tokens` end an answer.

use std::path::{Path, PathBuf};

use std::ops::ControlFlow;

use ferrospeed_data::{DataError, Record, each_record};
use ferrospeed_text::Conversation;
use serde_json::Value;

use crate::error::{EvaluateError, Result};

/// One task.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Its file.
    pub path: PathBuf,
    /// Its line.
    pub place: String,
    /// What its author calls it.
    pub id: Option<String>,
    /// What comes before the answer.
    pub prompt: Prompt,
    /// What is asked.
    pub question: Question,
}

/// What comes before the answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// A conversation.
    Messages(Conversation),
}

/// What is asked.
#[derive(Debug, Clone, PartialEq)]
pub enum Question {
    /// Which of these is the likeliest.
    Choice {
        /// The texts.
        choices: Vec<String>,
        /// The right one.
        answer: usize,
    },
    /// What the model writes.
    Exact {
        /// Any of these is right; blanks around it do not count.
        answers: Vec<String>,
        /// Texts that end it.
        stops: Vec<String>,
        /// Tokens of it, at most.
        max_tokens: usize,
    },
}

const KEYS: [&str; 7] = ["prompt", "messages", "choices", "answer", "id", "stop", "max_tokens"];
/// Tokens of an answer where nothing is said.
const MAX_TOKENS: usize = 64;
/// More is a slip of the finger.
const MOST: usize = 1 << 16;

/// Whether a record is a task.
pub(crate) fn is_case(record: &Value) -> bool {
    record.get("answer").is_some() || record.get("choices").is_some()
}

/// All tasks of some files.
pub fn read_cases(files: &[PathBuf], path: &Path) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    each_record(files, &mut |record| {
        let case = case(&record).map_err(|why| DataError::bad_place(record.path, record.place(), why))?;
        cases.push(case);
        Ok(ControlFlow::Continue(()))
    })?;
    if cases.is_empty() {
        return Err(EvaluateError::nothing(path, "is empty: there is no task in it"));
    }
    Ok(cases)
}

fn case(record: &Record<'_>) -> Result<Case, String> {
    let Value::Object(fields) = &record.value else { return Err("is no task, for it is no object".into()) };
    if let Some(key) = fields.keys().find(|key| !KEYS.contains(&key.as_str())) {
        return Err(format!("has '{key}', which is no key of tasks; known are {}", KEYS.join(", ")));
    }
    let given = |key: &str| fields.get(key).filter(|value| !value.is_null());
    let id = match given("id") {
        None => None,
        Some(Value::String(id)) => Some(id.clone()),
        Some(Value::Number(id)) => Some(id.to_string()),
        Some(_) => return Err("its 'id' is neither a text nor a number".into()),
    };
    let prompt = match (given("prompt"), given("messages")) {
        (Some(Value::String(prompt)), None) if prompt.is_empty() => {
            return Err("its 'prompt' is empty: nothing comes before the answer".into());
        }
        (Some(Value::String(prompt)), None) => Prompt::Text(prompt.clone()),
        (None, Some(messages)) => Prompt::Messages(
            Conversation::new(messages, None).map_err(|error| format!("its 'messages': {error}"))?,
        ),
        (Some(_), None) => return Err("its 'prompt' is no text".into()),
        (None, None) => return Err("asks nothing: give 'prompt', a text, or 'messages'".into()),
        (Some(_), Some(_)) => return Err("has 'prompt' and 'messages'; take one of the two out".into()),
    };
    let answer = given("answer")
        .ok_or("has no 'answer': the number of the right choice, or the text that is expected")?;
    let question = match given("choices") {
        Some(choices) => {
            if let Some(key) = ["stop", "max_tokens"].into_iter().find(|key| given(key).is_some()) {
                return Err(format!(
                    "has '{key}', which ends answers that are written, and its choices are not; take it out"
                ));
            }
            choice(choices, answer)?
        }
        None => exact(answer, given("stop"), given("max_tokens"), &prompt)?,
    };
    Ok(Case { path: record.path.to_path_buf(), place: record.place(), id, prompt, question })
}

fn texts(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
}

fn choice(choices: &Value, answer: &Value) -> Result<Question, String> {
    let choices = texts(choices).ok_or("its 'choices' are no list of texts")?;
    if choices.len() < 2 {
        return Err(format!("has {} choices: there is nothing to choose", choices.len()));
    }
    if let Some(at) = choices.iter().position(String::is_empty) {
        return Err(format!("its choice {at} is empty"));
    }
    let alike =
        (1..choices.len()).find_map(|at| Some((choices[..at].iter().position(|c| *c == choices[at])?, at)));
    if let Some((one, other)) = alike {
        return Err(format!("its choices {one} and {other} (from 0) are the same"));
    }
    let last = choices.len() - 1;
    let number = answer.as_u64().and_then(|number| usize::try_from(number).ok());
    match number.filter(|&number| number <= last) {
        Some(answer) => Ok(Question::Choice { choices, answer }),
        None => {
            let found = answer.as_str().and_then(|text| choices.iter().position(|c| c.trim() == text.trim()));
            let advice =
                found.map_or(String::new(), |at| format!("; '{}' is number {at}", choices[at].trim()));
            Err(format!("its 'answer' {answer} is no number of a choice, from 0 to {last}{advice}"))
        }
    }
}

fn exact(
    answer: &Value,
    stop: Option<&Value>,
    max_tokens: Option<&Value>,
    prompt: &Prompt,
) -> Result<Question, String> {
    let answers = match answer {
        Value::String(answer) => vec![answer.clone()],
        Value::Array(_) => texts(answer).ok_or("its 'answer' is a list, and not one of texts")?,
        Value::Number(number) => {
            return Err(format!(
                "its 'answer' is the number {number}, and it has no 'choices'; give them, or write \"{number}\" as the text that is expected"
            ));
        }
        _ => return Err("its 'answer' is neither a text nor the number of a choice".into()),
    };
    if answers.is_empty() || answers.iter().any(|answer| answer.trim().is_empty()) {
        return Err("its 'answer' is empty: any model would be right".into());
    }
    let stops = match stop {
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(stops) => texts(stops).ok_or("its 'stop' is neither a text nor a list of texts")?,
        // A text goes on; an answer in a conversation ends itself.
        None if matches!(prompt, Prompt::Text(_))
            && !answers.iter().any(|answer| answer.trim().contains('\n')) =>
        {
            vec!["\n".to_owned()]
        }
        None => Vec::new(),
    };
    if stops.iter().any(String::is_empty) {
        return Err("its 'stop' is empty: every answer would end before it begins".into());
    }
    let max_tokens = match max_tokens {
        None => MAX_TOKENS,
        Some(count) => {
            let count = count.as_u64().and_then(|count| usize::try_from(count).ok());
            count
                .filter(|count| (1..=MOST).contains(count))
                .ok_or_else(|| format!("its 'max_tokens' is no whole number from 1 to {MOST}"))?
        }
    };
    Ok(Question::Exact { answers, stops, max_tokens })
}
