//! Courses of jobs: what is told to whom, after which events.

use std::time::Duration;

use super::super::message::RoundEnd;
use super::*;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn limits(min_nodes: usize, listed: &[&str]) -> Limits {
    Limits {
        min_nodes,
        max_nodes: 8,
        max_restarts: 3,
        wait: seconds(100),
        listed: listed.iter().map(|name| (*name).to_owned()).collect(),
        allowed: AllowedRanks::any(),
    }
}

/// A course, what it had said, and the time.
struct Job {
    course: Course,
    now: Duration,
    told: Vec<String>,
    sent: Vec<(NodeId, ToAgent)>,
    verdict: Option<Verdict>,
}

impl Job {
    fn new(limits: Limits) -> Job {
        Job {
            course: Course::new(limits),
            now: Duration::ZERO,
            told: Vec::new(),
            sent: Vec::new(),
            verdict: None,
        }
    }

    fn on(&mut self, event: Event) {
        for action in self.course.on(event, self.now) {
            match action {
                Action::Send(node, message) => self.sent.push((node, message)),
                Action::Tell(text) => self.told.push(text),
                Action::End(verdict) => self.verdict = Some(verdict),
            }
        }
    }

    fn comes(&mut self, node: NodeId, name: &str, slots: u32) {
        let (name, slots) = (name.to_owned(), (0..slots).collect());
        self.on(Event::Came { node, name, slots, addr: format!("10.0.0.{node}") });
        self.is_ready(node);
    }

    fn is_ready(&mut self, node: NodeId) {
        self.on(Event::Said(node, FromAgent::Ready { port: 4000 + node as u16 }));
    }

    fn ends(&mut self, node: NodeId, round: u32, how: RoundEnd) {
        self.on(Event::Said(node, FromAgent::Ended { round, how }));
    }

    fn after(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.on(Event::Tick);
    }

    /// What was sent since the last call.
    fn sent(&mut self) -> Vec<(NodeId, ToAgent)> {
        std::mem::take(&mut self.sent)
            .into_iter()
            .filter(|(_, message)| !matches!(message, ToAgent::Welcome { .. }))
            .collect()
    }

    /// The round that began since the last call: its number, nodes with their ranks, and where it meets.
    fn begun(&mut self) -> (u32, Vec<(String, usize)>, String) {
        let sent = self.sent();
        let starts: Vec<&Start> = sent
            .iter()
            .filter_map(|(_, message)| match message {
                ToAgent::Start(start) => Some(start),
                _ => None,
            })
            .collect();
        let first = starts.first().unwrap_or_else(|| panic!("no round has begun: {sent:?}"));
        assert_eq!(starts.len(), first.nodes.len());
        assert!(
            starts
                .iter()
                .enumerate()
                .all(|(index, start)| start.node_rank == index && start.nodes == first.nodes)
        );
        let nodes = first.nodes.iter().map(|(name, slots)| (name.clone(), slots.len())).collect();
        (first.round, nodes, format!("{}:{}", first.master_addr, first.master_port))
    }
}

fn failed(said: &str, code: u8, follows: bool) -> RoundEnd {
    RoundEnd::Failed(Failure { said: said.to_owned(), code, follows })
}

fn named(nodes: &[(&str, usize)]) -> Vec<(String, usize)> {
    nodes.iter().map(|(name, ranks)| ((*name).to_owned(), *ranks)).collect()
}

#[test]
fn listed_nodes_are_waited_for_and_numbered_as_they_are_listed() {
    let mut job = Job::new(limits(1, &["a", "b"]));
    job.comes(1, "b", 2);
    assert!(job.sent().is_empty(), "a is on its way");
    job.comes(2, "a", 2);
    assert_eq!(job.begun(), (0, named(&[("a", 2), ("b", 2)]), "10.0.0.2:4002".to_owned()));
    // One that cannot be reached is not waited for, nor one that does not come in time.
    for (unreachable, waits) in [(true, 0), (false, 30)] {
        let mut job = Job::new(limits(1, &["a", "b"]));
        job.comes(1, "b", 2);
        if unreachable {
            job.on(Event::Unreachable("a".to_owned(), "ssh: no route".to_owned()));
        }
        job.after(waits);
        assert_eq!(job.begun().1, named(&[("b", 2)]));
    }
}

#[test]
fn a_node_that_is_lost_ends_the_round_at_once_and_the_next_goes_on_without_it() {
    let mut job = Job::new(limits(1, &["a", "b", "c"]));
    (1..).zip(["a", "b", "c"]).for_each(|(node, name)| job.comes(node, name, 2));
    job.begun();
    job.on(Event::Gone(1, "its agent has ended".to_owned()));
    assert_eq!(job.sent(), [(2, ToAgent::End), (3, ToAgent::End)]);
    job.ends(2, 0, failed("rank 2 lost rank 0", 76, true));
    job.is_ready(2);
    assert!(job.sent().is_empty(), "the ranks of c are still there");
    job.ends(3, 0, RoundEnd::Stopped);
    job.is_ready(3);
    assert_eq!(job.begun(), (1, named(&[("b", 2), ("c", 2)]), "10.0.0.2:4002".to_owned()));
    assert!(job.told.contains(&"a is gone: its agent has ended".to_owned()), "{:?}", job.told);
    // It costs no restart.
    assert_eq!(job.course.restarts, 0);
    job.ends(2, 1, RoundEnd::Well);
    job.ends(3, 1, RoundEnd::Well);
    assert_eq!(job.verdict, Some(Verdict::Succeeded));
}

#[test]
fn a_node_that_is_told_to_leave_has_the_others_save_first() {
    let mut job = Job::new(limits(1, &["a", "b"]));
    (1..).zip(["a", "b"]).for_each(|(node, name)| job.comes(node, name, 1));
    job.begun();
    let why = "its agent got signal 15".to_owned();
    job.on(Event::Said(2, FromAgent::Leaving { why: why.clone() }));
    job.on(Event::Said(2, FromAgent::Leaving { why }));
    assert_eq!(job.sent(), [(1, ToAgent::Leave)], "the one that leaves tells its ranks itself");
    job.ends(2, 0, RoundEnd::Saved);
    job.on(Event::Gone(2, "its agent has ended".to_owned()));
    job.ends(1, 0, RoundEnd::Saved);
    job.is_ready(1);
    assert_eq!(job.begun().1, named(&[("a", 1)]));
    assert_eq!(job.told.iter().filter(|text| text.starts_with("b ")).count(), 1, "{:?}", job.told);
}

#[test]
fn nodes_that_come_are_taken_in_together_after_a_save() {
    let mut job = Job::new(limits(1, &["a"]));
    job.comes(1, "a", 2);
    job.begun();
    job.now = seconds(100);
    job.comes(2, "new", 2);
    job.comes(3, "new", 2);
    assert!(job.sent().is_empty());
    job.after(2);
    assert_eq!(job.sent(), [(1, ToAgent::Leave)]);
    job.ends(1, 0, RoundEnd::Saved);
    job.is_ready(1);
    assert_eq!(job.begun().1, named(&[("a", 2), ("new", 2), ("new-2", 2)]));
    assert_eq!(job.verdict, None);
}

#[test]
fn only_as_many_ranks_run_as_the_batch_allows_and_the_rest_waits_in_reserve() {
    let allowed = AllowedRanks::by(|ranks| [1, 2, 4, 8].contains(&ranks));
    let mut job = Job::new(Limits { allowed, ..limits(1, &["a", "b", "c"]) });
    (1..).zip(["a", "b", "c"]).for_each(|(node, name)| job.comes(node, name, 2));
    assert_eq!(job.begun().1, named(&[("a", 2), ("b", 2)]));
    assert!(job.told.iter().any(|text| text.contains("1 node(s) in reserve")), "{:?}", job.told);
    // A third node brings no more ranks; the loss of one does not cost any either.
    job.now = seconds(50);
    job.on(Event::Tick);
    assert!(job.sent().is_empty());
    job.on(Event::Gone(2, "lost".to_owned()));
    job.sent();
    job.ends(1, 0, RoundEnd::Stopped);
    job.is_ready(1);
    assert_eq!(job.begun().1, named(&[("a", 2), ("c", 2)]));
    // Of three ranks on two nodes two are used, which one node has: but two nodes are asked for.
    let two = Limits { allowed: AllowedRanks::by(|ranks| ranks == 2), ..limits(2, &[]) };
    assert_eq!(choose(&[2, 1], &two), None);
    assert_eq!(choose(&[1, 2], &two), Some(vec![1, 1]));
}

#[test]
fn too_few_nodes_end_the_job_after_the_wait_and_it_says_who_left() {
    let mut job = Job::new(limits(2, &["a", "b", "c"]));
    job.on(Event::Unreachable("c".to_owned(), "ssh: no route".to_owned()));
    job.comes(1, "a", 1);
    job.comes(2, "b", 1);
    job.begun();
    job.on(Event::Gone(2, "its agent has ended".to_owned()));
    job.ends(1, 0, RoundEnd::Stopped);
    job.is_ready(1);
    job.after(99);
    assert_eq!(job.verdict, None);
    job.after(2);
    let Some(Verdict::Failed { said, code: 1 }) = &job.verdict else { panic!("{:?}", job.verdict) };
    assert!(
        said.contains("b is gone: its agent has ended") && said.contains("c is not there: ssh: no route"),
        "{said}"
    );
    assert_eq!(job.sent(), [(1, ToAgent::End), (1, ToAgent::Over { code: 1 })]);
}

#[test]
fn ranks_that_fail_are_started_again_a_few_times_and_the_one_that_failed_by_itself_is_blamed() {
    let mut job = Job::new(limits(1, &["a", "b"]));
    job.comes(1, "a", 1);
    job.comes(2, "b", 1);
    for restart in 0..3 {
        job.begun();
        job.ends(1, restart, failed("rank 0 ended because another rank had failed", 76, true));
        assert_eq!(job.sent(), [(2, ToAgent::End)]);
        job.ends(2, restart, failed("rank 1 was killed by SIGKILL", 137, false));
        (1..=2).for_each(|node| job.is_ready(node));
        assert!(job.sent().is_empty(), "there is a pause");
        job.after(1 << restart);
    }
    job.begun();
    job.ends(2, 3, failed("rank 1 was killed by SIGKILL", 137, false));
    job.ends(1, 3, failed("follows", 76, true));
    let said = "rank 1 was killed by SIGKILL".to_owned();
    assert_eq!(job.verdict, Some(Verdict::Failed { said, code: 137 }));
    // A mistake does not get better.
    let mut job = Job::new(limits(1, &["a"]));
    job.comes(1, "a", 1);
    job.ends(1, 0, failed("no such recipe", 2, false));
    assert_eq!(job.verdict, Some(Verdict::Failed { said: "no such recipe".to_owned(), code: 2 }));
}

#[test]
fn a_job_that_is_told_to_end_saves_and_says_so_by_its_code() {
    let mut job = Job::new(limits(1, &["a", "b"]));
    job.comes(1, "a", 1);
    job.comes(2, "b", 1);
    job.begun();
    job.on(Event::Interrupted(15));
    assert_eq!(job.sent(), [(1, ToAgent::Leave), (2, ToAgent::Leave)]);
    job.ends(1, 0, RoundEnd::Saved);
    job.ends(2, 0, RoundEnd::Saved);
    assert_eq!(job.verdict, Some(Verdict::Interrupted { signal: Some(15), code: 75 }));
    // Ranks that leave though nobody here has told them to are taken at their word.
    let mut job = Job::new(limits(1, &["a", "b"]));
    job.comes(1, "a", 1);
    job.comes(2, "b", 1);
    job.begun();
    job.ends(1, 0, RoundEnd::Saved);
    assert_eq!(job.sent(), [(2, ToAgent::Leave)]);
    job.ends(2, 0, RoundEnd::Saved);
    assert_eq!(job.verdict, Some(Verdict::Interrupted { signal: None, code: 75 }));
}

/// What an agent of a simulated job has under way.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Doing {
    Nothing,
    Training(u32),
    Leaving(u32),
    Ending(u32),
}

/// Thousands of events in any order: no round has a node twice or one that is gone, no round begins while ranks of the one before
/// run, whoever is told to leave ends, and the job comes to its end.
#[test]
fn whatever_happens_in_whatever_order_the_job_comes_to_its_end() {
    for seed in 0..300u64 {
        let mut random = ferrospeed_testkit::property::Random(seed);
        let allowed = AllowedRanks::by(|ranks| 24 % ranks == 0);
        let listed = ["a", "b", "c"];
        let mut job = Job::new(Limits { allowed, ..limits(1 + (seed % 2) as usize, &listed) });
        let mut agents: BTreeMap<NodeId, Doing> = BTreeMap::new();
        let (mut next, mut events) = (1, 0);
        while job.verdict.is_none() {
            events += 1;
            assert!(events < 20_000, "seed {seed}: the job does not end: {:?}", job.course);
            job.after(random.below(2) as u64);
            let calm = events > 400;
            let some = agents.keys().nth(random.below(agents.len().max(1))).copied();
            match (random.below(if calm { 3 } else { 12 }), some) {
                (3, _) | (_, None) if agents.len() < 5 => {
                    agents.insert(next, Doing::Nothing);
                    job.comes(
                        next,
                        listed.get(next as usize - 1).unwrap_or(&"new"),
                        1 + random.below(3) as u32,
                    );
                    next += 1;
                }
                (4, Some(node)) => {
                    agents.remove(&node);
                    job.on(Event::Gone(node, "killed".to_owned()));
                }
                (5, Some(node)) => {
                    job.on(Event::Said(node, FromAgent::Leaving { why: "told".to_owned() }));
                    if let Some(Doing::Training(round)) = agents.get(&node).copied() {
                        agents.insert(node, Doing::Leaving(round));
                    } else if agents[&node] == Doing::Nothing {
                        agents.remove(&node);
                        job.on(Event::Gone(node, "left".to_owned()));
                    }
                }
                (6, Some(node)) if random.below(8) == 0 => {
                    if let Doing::Training(round) = agents[&node] {
                        agents.insert(node, Doing::Nothing);
                        job.ends(node, round, failed("a rank failed", 1, random.below(2) == 0));
                        job.is_ready(node);
                    }
                }
                (0..=2, Some(node)) => {
                    let how = match agents[&node] {
                        Doing::Training(round) if calm => Some((round, RoundEnd::Well)),
                        Doing::Leaving(round) => Some((round, RoundEnd::Saved)),
                        Doing::Ending(round) => Some((round, RoundEnd::Stopped)),
                        _ => None,
                    };
                    if let Some((round, how)) = how {
                        agents.insert(node, Doing::Nothing);
                        job.ends(node, round, how);
                        job.is_ready(node);
                    }
                }
                _ => {}
            }
            for (node, message) in std::mem::take(&mut job.sent) {
                // Who is gone hears nothing.
                let Some(doing) = agents.get_mut(&node) else { continue };
                *doing = match (message, *doing) {
                    (ToAgent::Start(start), Doing::Nothing) => {
                        let ranks: usize = start.nodes.iter().map(|(_, slots)| slots.len()).sum();
                        assert!(24 % ranks == 0, "seed {seed}: {ranks} ranks");
                        Doing::Training(start.round)
                    }
                    (ToAgent::Start(start), busy) => panic!("seed {seed}: {start:?} while {busy:?}"),
                    (ToAgent::Leave, Doing::Training(round)) => Doing::Leaving(round),
                    (ToAgent::End, Doing::Training(round) | Doing::Leaving(round)) => Doing::Ending(round),
                    (_, doing) => doing,
                };
            }
        }
    }
}
