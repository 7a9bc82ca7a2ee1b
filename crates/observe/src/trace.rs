//! What a rank did when, for Chrome's and Perfetto's timelines.
//!
//! Each rank keeps a [`Timeline`], bounded in size; [`document`] puts those of all ranks into one file in the trace event
//! format. A rank is a process there; compute, communication and files have threads of their own, and more than one where
//! things go on beside each other, for slices of one thread may only nest.

use std::fmt::Write;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Spans that a rank keeps; what comes later is counted, and left out.
pub const MAX_SPANS: usize = 200_000;
/// Threads of a kind; what goes on beside so many others is left out of the picture.
const MAX_LANES: usize = 64;

/// What a span is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activity {
    /// Forward, backward, step, and the modules in them.
    Compute,
    /// Collectives and messages.
    Communication,
    /// Data, checkpoints, logs.
    Files,
}

impl Activity {
    const ALL: [Activity; 3] = [Activity::Compute, Activity::Communication, Activity::Files];

    fn name(self) -> &'static str {
        match self {
            Activity::Compute => "compute",
            Activity::Communication => "communication",
            Activity::Files => "files",
        }
    }
}

/// Something that took a while. Times are in nanoseconds of the clock that ranks agreed on.
#[derive(Debug, Clone, PartialEq)]
struct Span {
    activity: Activity,
    name: String,
    begin_ns: i64,
    end_ns: i64,
    bytes: Option<u64>,
}

/// What one rank did.
#[derive(Debug)]
pub struct Timeline {
    rank: usize,
    /// A moment, and what the agreed clock said then.
    origin: (Instant, i64),
    spans: Vec<Span>,
    left_out: u64,
}

/// Nanoseconds since 1970 by this host's clock.
pub fn unix_ns() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

impl Timeline {
    /// Empty. `zero_ns` is where the agreed clock begins, by this host's.
    pub fn new(rank: usize, zero_ns: i64) -> Timeline {
        Timeline { rank, origin: (Instant::now(), unix_ns() - zero_ns), spans: Vec::new(), left_out: 0 }
    }

    /// Adds what went on between two moments.
    pub fn add(
        &mut self,
        activity: Activity,
        name: String,
        begin: Instant,
        end: Instant,
        bytes: Option<u64>,
    ) {
        if self.spans.len() >= MAX_SPANS {
            self.left_out += 1;
            return;
        }
        let (begin_ns, end_ns) = (self.at(begin), self.at(end));
        self.spans.push(Span { activity, name, begin_ns, end_ns, bytes });
    }

    fn at(&self, moment: Instant) -> i64 {
        let (origin, ns) = self.origin;
        match moment.checked_duration_since(origin) {
            Some(later) => ns + later.as_nanos() as i64,
            None => ns - origin.duration_since(moment).as_nanos() as i64,
        }
    }

    /// How many spans there was no room for.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// The events of this rank, between commas.
    pub fn into_events(mut self) -> String {
        let rank = self.rank;
        let mut events = Vec::with_capacity(self.spans.len() + 8);
        events.push(metadata("process_name", rank, 0, &format!("rank {rank}")));
        // What holds another comes before it.
        self.spans.sort_by_key(|span| (span.activity, span.begin_ns, std::cmp::Reverse(span.end_ns)));
        for (number, activity) in Activity::ALL.into_iter().enumerate() {
            let mut lanes: Vec<Vec<i64>> = Vec::new();
            for span in self.spans.iter().filter(|span| span.activity == activity) {
                let Some(lane) = place(&mut lanes, span) else { continue };
                events.push(slice(span, rank, number * MAX_LANES + lane));
            }
            for lane in 0..lanes.len() {
                events.push(metadata("thread_name", rank, number * MAX_LANES + lane, activity.name()));
            }
        }
        events.join(",\n")
    }
}

/// The first lane in which a span nests; spans come in the order of their beginning. A lane is the ends of what is open in it.
fn place(lanes: &mut Vec<Vec<i64>>, span: &Span) -> Option<usize> {
    for (index, open) in lanes.iter_mut().enumerate() {
        while open.last().is_some_and(|end| *end <= span.begin_ns) {
            open.pop();
        }
        if open.last().is_none_or(|end| span.end_ns <= *end) {
            open.push(span.end_ns);
            return Some(index);
        }
    }
    (lanes.len() < MAX_LANES).then(|| {
        lanes.push(vec![span.end_ns]);
        lanes.len() - 1
    })
}

fn text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn metadata(what: &str, rank: usize, thread: usize, name: &str) -> String {
    format!(r#"{{"ph":"M","name":"{what}","pid":{rank},"tid":{thread},"args":{{"name":{}}}}}"#, text(name))
}

/// Microseconds, to the nanosecond.
fn micros(ns: i64) -> String {
    format!("{}{}.{:03}", if ns < 0 { "-" } else { "" }, ns.unsigned_abs() / 1000, ns.unsigned_abs() % 1000)
}

fn slice(span: &Span, rank: usize, thread: usize) -> String {
    let mut event = format!(
        r#"{{"ph":"X","name":{},"cat":"{}","pid":{rank},"tid":{thread},"ts":{},"dur":{}"#,
        text(&span.name),
        span.activity.name(),
        micros(span.begin_ns),
        micros(span.end_ns - span.begin_ns)
    );
    if let Some(bytes) = span.bytes {
        // Writing to a string does not fail.
        let _ = write!(event, r#","args":{{"bytes":{bytes}}}"#);
    }
    event.push('}');
    event
}

/// One file of the events of all ranks.
pub fn document(ranks: &[String]) -> String {
    format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", ranks.join(",\n"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Value;

    use super::*;

    fn events(timeline: Timeline) -> Vec<Value> {
        let document: Value = serde_json::from_str(&document(&[timeline.into_events()])).unwrap();
        document["traceEvents"].as_array().unwrap().clone()
    }

    #[test]
    fn what_is_inside_shares_a_thread_and_what_overlaps_does_not() {
        let mut timeline = Timeline::new(3, unix_ns());
        let zero = timeline.origin.0;
        let at = |ms: u64| zero + Duration::from_millis(ms);
        timeline.add(Activity::Compute, "block \"0\"".into(), at(12), at(15), None);
        timeline.add(Activity::Compute, "forward".into(), at(10), at(20), None);
        timeline.add(Activity::Communication, "all_reduce".into(), at(10), at(14), Some(64));
        timeline.add(Activity::Communication, "all_gather".into(), at(12), at(18), Some(32));
        timeline.add(Activity::Communication, "barrier".into(), at(14), at(15), None);
        let events = events(timeline);
        let thread = |name: &str| {
            let event = events.iter().find(|event| event["name"] == name).unwrap();
            assert_eq!(event["pid"], 3);
            event["tid"].as_u64().unwrap()
        };
        assert_eq!(thread("forward"), thread("block \"0\""));
        assert_ne!(thread("all_reduce"), thread("all_gather"));
        assert_eq!(thread("barrier"), thread("all_reduce"));
        let inner = events.iter().find(|event| event["name"] == "block \"0\"").unwrap();
        assert_eq!(inner["dur"], 3000.0);
        let names = events.iter().filter(|event| event["name"] == "thread_name").count();
        assert_eq!(names, 3);
    }

    #[test]
    fn a_timeline_is_bounded_and_says_what_it_lacks() {
        let mut timeline = Timeline::new(0, 0);
        let now = Instant::now();
        for _ in 0..MAX_SPANS + 5 {
            timeline.add(Activity::Files, String::new(), now, now, None);
        }
        assert_eq!((timeline.spans.len(), timeline.left_out()), (MAX_SPANS, 5));
    }

    #[test]
    fn times_before_the_beginning_are_negative() {
        assert_eq!((micros(1_234_567), micros(-1_500)), ("1234.567".to_owned(), "-1.500".to_owned()));
    }
}
