//! Reads the flight recorders of a job and says in one sentence what went wrong.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Result};
use crate::op::Kind;
use crate::recorder::{Progress, Record};

/// A recorder holds a thousand operations, each with the ranks of its group: that of thousands of ranks has some megabytes.
const MAX_RECORDER_BYTES: u64 = 256 << 20;

/// Reads every `rank-*.jsonl` of a folder, by rank.
pub fn read(folder: &Path) -> Result<BTreeMap<usize, Vec<Record>>> {
    let what = |path: &Path| format!("reading the flight recorder {}", path.display());
    let entries = std::fs::read_dir(folder).map_err(|error| Error::io(what(folder), error))?;
    let mut traces = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(|error| Error::io(what(folder), error))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let rank = name.strip_prefix("rank-").and_then(|name| name.strip_suffix(".jsonl"));
        let Some(rank) = rank.and_then(|rank| rank.parse::<usize>().ok()) else { continue };
        let text = ferrospeed_files::read_text(&path, MAX_RECORDER_BYTES)
            .map_err(|error| Error::io(what(&path), error))?;
        let record = |(line, text): (usize, &str)| {
            serde_json::from_str::<Record>(text).map_err(|error| {
                Error::io(format!("{}, line {}", what(&path), line + 1), std::io::Error::other(error))
            })
        };
        let records = text.lines().enumerate().map(record).collect::<Result<Vec<Record>>>()?;
        if traces.insert(rank, records).is_some() {
            let why = format!("another file of the folder is of rank {rank}, too; remove one of the two");
            return Err(Error::io(what(&path), std::io::Error::other(why)));
        }
    }
    Ok(traces)
}

/// Says which rank never entered which operation, in one sentence.
pub fn diff(folder: &Path) -> Result<String> {
    let traces = read(folder)?;
    if traces.is_empty() {
        return Ok(format!("{} holds no flight recorder (rank-*.jsonl)", folder.display()));
    }
    Ok(explain(&traces))
}

fn explain(traces: &BTreeMap<usize, Vec<Record>>) -> String {
    let records = || traces.values().flatten();
    // The trouble that began first explains the rest.
    let mut stuck: Vec<&Record> = records().filter(|record| record.progress != Progress::Done).collect();
    stuck.sort_by_key(|record| record.started_us);
    for record in stuck {
        let sentence = match record.kind {
            Kind::Send | Kind::Recv => explain_message(record, traces),
            _ => explain_collective(record, traces),
        };
        if let Some(sentence) = sentence {
            return sentence;
        }
    }
    let operations = records().count();
    format!(
        "no rank is behind: the {} recorders hold {operations} operations, and every one was entered by all its ranks",
        traces.len()
    )
}

fn explain_collective(stuck: &Record, traces: &BTreeMap<usize, Vec<Record>>) -> Option<String> {
    let in_group = |record: &&Record| record.group == stuck.group && record.peer.is_none();
    let (mut entered, mut behind, mut silent) = (Vec::new(), Vec::new(), Vec::new());
    for rank in &stuck.group_ranks {
        let Some(records) = traces.get(rank) else {
            silent.push(rank.to_string());
            continue;
        };
        let last = records.iter().filter(in_group).max_by_key(|record| record.sequence);
        let same = records.iter().filter(in_group).find(|record| record.sequence == stuck.sequence);
        match (same, last) {
            (Some(other), _) if !same_call(other, stuck) => {
                return Some(format!(
                    "rank {} called {}, but rank {rank} called {} in group {}",
                    stuck.rank, stuck.description, other.description, stuck.group
                ));
            }
            (_, Some(last)) if last.sequence >= stuck.sequence => entered.push(rank.to_string()),
            (_, Some(last)) => {
                behind.push(format!("rank {rank} (whose last operation there was {})", last.description))
            }
            (_, None) => behind.push(format!("rank {rank} (which never used the group)")),
        }
    }
    let (entered, silent) = (entered.join(", "), silent.join(", "));
    if behind.is_empty() {
        return (!silent.is_empty()).then(|| {
            format!(
                "rank {entered} entered {} in group {}; rank {silent} left no recorder, so look there first",
                stuck.description, stuck.group
            )
        });
    }
    let besides = if silent.is_empty() { String::new() } else { format!("; rank {silent} left no recorder") };
    Some(format!(
        "{} never entered {} in group {}, which rank {entered} entered{besides}",
        behind.join(" and "),
        stuck.description,
        stuck.group,
    ))
}

/// Whether two records are of the same call, wherever in the source it was made.
fn same_call(one: &Record, other: &Record) -> bool {
    let call = |record: &Record| record.description.split(" at ").next().map(str::to_owned);
    one.kind == other.kind && call(one) == call(other)
}

fn explain_message(stuck: &Record, traces: &BTreeMap<usize, Vec<Record>>) -> Option<String> {
    let peer = stuck.peer?;
    let counterpart = if stuck.kind == Kind::Send { Kind::Recv } else { Kind::Send };
    let answers = |record: &Record| {
        record.group == stuck.group
            && record.kind == counterpart
            && record.peer == Some(stuck.rank)
            && record.sequence >= stuck.sequence
    };
    let answered = traces.get(&peer).is_some_and(|records| records.iter().any(answers));
    (!answered).then(|| {
        format!(
            "rank {peer} never entered the {} that answers {} of rank {} in group {}",
            counterpart.name(),
            stuck.description,
            stuck.rank,
            stuck.group
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rank: usize, sequence: u64, kind: Kind, progress: Progress) -> Record {
        Record {
            rank,
            group: "world".into(),
            group_ranks: vec![0, 1, 2],
            sequence,
            kind,
            peer: None,
            description: format!("{}() #{sequence} at a.rs:1:1", kind.name()),
            started_us: sequence,
            duration_us: None,
            progress,
            error: None,
        }
    }

    fn explained(records: Vec<Record>) -> String {
        let mut traces: BTreeMap<usize, Vec<Record>> = BTreeMap::new();
        records.into_iter().for_each(|record| traces.entry(record.rank).or_default().push(record));
        explain(&traces)
    }

    #[test]
    fn the_rank_that_stayed_behind_is_named_with_its_last_operation() {
        let text = explained(vec![
            record(0, 4, Kind::AllReduce, Progress::Running),
            record(1, 4, Kind::AllReduce, Progress::Running),
            record(2, 3, Kind::Barrier, Progress::Done),
        ]);
        assert_eq!(
            text,
            "rank 2 (whose last operation there was barrier() #3 at a.rs:1:1) never entered \
             all_reduce() #4 at a.rs:1:1 in group world, which rank 0, 1 entered"
        );
    }

    #[test]
    fn a_rank_without_a_recorder_is_not_accused() {
        let text = explained(vec![
            record(0, 4, Kind::AllReduce, Progress::Running),
            record(1, 4, Kind::AllReduce, Progress::Running),
        ]);
        assert_eq!(
            text,
            "rank 0, 1 entered all_reduce() #4 at a.rs:1:1 in group world; rank 2 left no recorder, so look there first"
        );
        let text = explained(vec![
            record(0, 4, Kind::AllReduce, Progress::Running),
            record(1, 3, Kind::AllReduce, Progress::Done),
        ]);
        assert!(
            text.starts_with("rank 1 (whose last") && text.ends_with("; rank 2 left no recorder"),
            "{text}"
        );
    }

    #[test]
    fn ranks_in_different_operations_are_named() {
        let text = explained(vec![
            record(0, 4, Kind::AllReduce, Progress::Failed),
            record(1, 4, Kind::Barrier, Progress::Failed),
            record(2, 4, Kind::AllReduce, Progress::Failed),
        ]);
        assert!(
            text.starts_with("rank 0 called all_reduce() #4") && text.contains("but rank 1 called barrier()"),
            "{text}"
        );
    }

    #[test]
    fn a_message_without_its_other_half_is_named() {
        let mut sent = record(0, 0, Kind::Send, Progress::Running);
        sent.peer = Some(1);
        let text = explained(vec![sent, record(1, 3, Kind::Barrier, Progress::Done)]);
        assert!(text.starts_with("rank 1 never entered the recv that answers send() #0"), "{text}");
    }

    #[test]
    fn a_job_in_step_is_said_to_be() {
        let text = explained((0..3).map(|rank| record(rank, 1, Kind::Barrier, Progress::Done)).collect());
        assert!(text.starts_with("no rank is behind"), "{text}");
    }
}
