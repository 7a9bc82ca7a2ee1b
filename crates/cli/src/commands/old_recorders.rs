//! Flight recorders of jobs that failed lie in the user's private folder for whoever asks what happened (`ferrospeed trace diff`).
//! Before ranks are started, those go that nobody will ask for any more.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ferrospeed_comm::private;

/// How long they stay.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Of how many jobs they stay, the newest.
const MOST_JOBS: usize = 20;
/// So many names of the folder are looked at at once; who has more left comes back to the rest with the next job.
const MAX_NAMES: usize = 10_000;

/// Removes what is old. What cannot be looked at or removed stays: it is in nobody's way. Other temporary files, which may be millions
/// and are everybody's, are not read through.
pub(super) fn remove() {
    if let Some(folder) = private::existing_folder() {
        remove_from(&folder, SystemTime::now());
    }
}

fn remove_from(private: &Path, now: SystemTime) {
    let Ok(entries) = std::fs::read_dir(private) else { return };
    let mut found: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .take(MAX_NAMES)
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"trace-"))
        .filter_map(|entry| {
            Some((entry.metadata().ok().filter(|found| found.is_dir())?.modified().ok()?, entry.path()))
        })
        .collect();
    found.sort_by_key(|(written, _)| std::cmp::Reverse(*written));
    for (place, (written, folder)) in found.into_iter().enumerate() {
        if place >= MOST_JOBS || now.duration_since(written).is_ok_and(|age| age > KEPT) {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorders_of_the_newest_jobs_stay_for_a_week() {
        let place = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let folder = place.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("rank-00000.jsonl"), "").unwrap();
        };
        let count = || std::fs::read_dir(place.path()).unwrap().count();
        (0..MOST_JOBS + 5).for_each(|job| make(&format!("trace-{job}")));
        make("checkpoints");
        let now = SystemTime::now();
        remove_from(place.path(), now);
        assert_eq!(count(), MOST_JOBS + 1);
        remove_from(place.path(), now + KEPT - Duration::from_secs(60));
        assert_eq!(count(), MOST_JOBS + 1);
        remove_from(place.path(), now + KEPT + Duration::from_secs(60));
        assert_eq!(count(), 1, "what is no recorder stays");
    }
}
