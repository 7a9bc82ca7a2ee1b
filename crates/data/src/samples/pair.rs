//! Two answers to one prompt, of which one is preferred.
//!
//! Both are texts, or both lists of messages. Where no prompt is named it is what both begin with, as TRL has it: of messages, those
//! that are alike; of texts, all characters up to the first that differs, but for a blank before it, which belongs to the answers.

use serde_json::{Value, json};

use super::kind::{Content, completion};

/// What the chosen and the rejected answer of a record say.
pub(super) fn of(record: &Value) -> Result<(Content, Content), String> {
    let (chosen, rejected) = (&record["chosen"], &record["rejected"]);
    let tools = record.get("tools");
    let (prompt, [chosen, rejected]) = match (chosen, rejected) {
        (Value::String(chosen), Value::String(rejected)) => texts(record, chosen, rejected)?,
        (Value::Array(chosen), Value::Array(rejected)) => lists(record, chosen, rejected)?,
        _ => {
            return Err(
                "its 'chosen' and 'rejected' are neither both texts nor both lists of messages".into()
            );
        }
    };
    let answer = |which: &str, answer: &Value| {
        completion(&prompt, answer, tools).map_err(|why| format!("its '{which}': {why}"))
    };
    Ok((answer("chosen", &chosen)?, answer("rejected", &rejected)?))
}

type Split = (Value, [Value; 2]);

fn texts(record: &Value, chosen: &str, rejected: &str) -> Result<Split, String> {
    match record.get("prompt") {
        Some(Value::String(prompt)) => Ok((prompt.as_str().into(), [chosen.into(), rejected.into()])),
        None | Some(Value::Null) => {
            let alike = chosen.chars().zip(rejected.chars()).take_while(|(one, other)| one == other);
            let alike: usize = alike.map(|(one, _)| one.len_utf8()).sum();
            let prompt = &chosen[..alike];
            let prompt = prompt.strip_suffix(' ').unwrap_or(prompt);
            let rest = [&chosen[prompt.len()..], &rejected[prompt.len()..]];
            Ok((prompt.into(), rest.map(Value::from)))
        }
        Some(_) => {
            Err("its 'prompt' is no text, and its 'chosen' and 'rejected' are; write all three as texts, or all as lists of messages".into())
        }
    }
}

fn lists(record: &Value, chosen: &[Value], rejected: &[Value]) -> Result<Split, String> {
    let alike = chosen.iter().zip(rejected).take_while(|(one, other)| one == other).count();
    // What both say to the end is an answer too.
    let alike = alike.min(chosen.len().saturating_sub(1)).min(rejected.len().saturating_sub(1));
    let cut = |count: usize| [chosen, rejected].map(|list| Value::from(list[count..].to_vec()));
    match record.get("prompt") {
        Some(Value::Array(prompt)) => Ok((prompt.clone().into(), [chosen, rejected].map(|list| list.to_vec().into()))),
        Some(Value::String(prompt)) if alike == 0 => {
            Ok((json!([{ "role": "user", "content": prompt }]), cut(0)))
        }
        Some(Value::String(prompt)) => {
            let asked = chosen[..alike].iter().rev().find(|message| message["role"] == "user");
            if asked.is_none_or(|message| message["content"].as_str().map(str::trim) != Some(prompt.trim())) {
                return Err("its 'prompt' is not what the messages of 'chosen' and 'rejected' ask; take 'prompt' out, or the question out of both lists".into());
            }
            Ok((chosen[..alike].to_vec().into(), cut(alike)))
        }
        None | Some(Value::Null) if alike == 0 => {
            Err("its 'chosen' and 'rejected' do not begin with the same message, and there is no 'prompt': what both answer is not known; give 'prompt'".into())
        }
        None | Some(Value::Null) => Ok((chosen[..alike].to_vec().into(), cut(alike))),
        Some(_) => Err("its 'prompt' is neither a text nor a list of messages".into()),
    }
}
