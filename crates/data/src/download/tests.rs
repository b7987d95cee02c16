//! Downloads from small servers on this machine, each with one way to misbehave.

use std::cell::RefCell;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::super::silent;
use super::*;

const NAME: &str = "file.gz";
/// More than one read of 64 KiB.
const SIZE: usize = 200_000;

fn contents() -> Vec<u8> {
    (0..SIZE as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// What a server sends, byte for byte; then it closes the connection.
type Reply = Vec<u8>;

fn reply(status: &str, headers: &[String], body: &[u8]) -> Reply {
    let mut bytes = format!("HTTP/1.1 {status}\r\nConnection: close\r\n").into_bytes();
    headers.iter().for_each(|header| bytes.extend(format!("{header}\r\n").bytes()));
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

fn announced(length: usize) -> String {
    format!("Content-Length: {length}")
}

fn whole() -> Reply {
    reply("200 OK", &[announced(SIZE)], &contents())
}

fn rest(start: usize) -> Reply {
    let range = format!("Content-Range: bytes {start}-{}/{SIZE}", SIZE - 1);
    reply("206 Partial Content", &[announced(SIZE - start), range], &contents()[start..])
}

fn not_found() -> Reply {
    reply("404 Not Found", &[announced(4)], b"gone")
}

/// Answers each request by `answer(number of the request from 0, start of its Range)`; notes what was asked.
struct Server {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Option<usize>>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(answer: impl Fn(usize, Option<usize>) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (notes, end) = (Arc::clone(&asked), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if end.load(Ordering::SeqCst) {
                    break;
                }
                let Some(start) = read_request(&stream) else { continue };
                let number = notes.lock().unwrap().len();
                notes.lock().unwrap().push(start);
                // The client may hang up when it has seen enough.
                let _ = (&stream).write_all(&answer(number, start));
            }
        });
        Self { address, asked, stop, thread: Some(thread) }
    }

    fn mirror(&self) -> String {
        format!("http://{}/folder/", self.address)
    }

    /// The start of the Range of each request so far.
    fn asked(&self) -> Vec<Option<usize>> {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            // A panic of the server has made the test fail already.
            let _ = thread.join();
        }
    }
}

/// The start of a request's Range; the outer `None` if the client hung up.
fn read_request(stream: &TcpStream) -> Option<Option<usize>> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    assert_eq!(lines.next()?, format!("GET /folder/{NAME} HTTP/1.1"));
    let mut start = None;
    for line in lines.take_while(|line| !line.is_empty()) {
        if let Some(range) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            start = Some(range.trim_end_matches('-').parse().unwrap());
        }
    }
    Some(start)
}

/// A folder to download into.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// With the first bytes of the file from an earlier download.
    fn with_part(part: &[u8]) -> Self {
        let place = Self::new();
        fs::write(place.part(), part).unwrap();
        place
    }

    fn target(&self) -> PathBuf {
        self.0.path().join(NAME)
    }

    fn part(&self) -> PathBuf {
        self.0.path().join(format!("{NAME}.part"))
    }

    fn fetch_with(&self, servers: &[&Server], progress: &Progress<'_>) -> Result<(), DataError> {
        let mut options = DownloadOptions::new(servers.iter().map(|server| server.mirror()));
        options.read_timeout = Duration::from_millis(500);
        let sha256 = sha256(&mut contents().as_slice()).unwrap();
        let file = RemoteFile { name: NAME, size: SIZE as u64, sha256: &sha256 };
        fetch_files(self.0.path(), &[file], &options, progress)
    }

    fn fetch(&self, servers: &[&Server]) -> Result<(), DataError> {
        self.fetch_with(servers, &silent)
    }

    /// The file is there and right, and nothing else is.
    #[track_caller]
    fn assert_fetched(&self) {
        assert!(fs::read(self.target()).unwrap() == contents(), "wrong contents");
        assert_eq!(fs::read_dir(self.0.path()).unwrap().count(), 1, "something was left behind");
    }

    /// Neither the file nor a part of it is there.
    #[track_caller]
    fn assert_empty(&self) {
        assert_eq!(fs::read_dir(self.0.path()).unwrap().count(), 0, "something was left behind");
    }
}

/// The reasons of a download that failed, one a mirror.
#[track_caller]
fn reasons(result: Result<(), DataError>) -> Vec<String> {
    match result {
        Err(DataError::Download { file, attempts }) => {
            assert_eq!(file, NAME);
            attempts.into_iter().map(|attempt| attempt.reason).collect()
        }
        other => panic!("expected a failed download, found {other:?}"),
    }
}

#[test]
fn a_file_is_fetched_once() {
    let server = Server::start(|_, _| whole());
    let place = Place::new();
    place.fetch(&[&server]).unwrap();
    place.fetch(&[&server]).unwrap();
    place.assert_fetched();
    assert_eq!(server.asked(), [None]);
}

#[test]
fn a_wrong_file_is_replaced() {
    let server = Server::start(|_, _| whole());
    for wrong in [vec![], vec![0; SIZE]] {
        let place = Place::new();
        fs::write(place.target(), wrong).unwrap();
        place.fetch(&[&server]).unwrap();
        place.assert_fetched();
    }
}

#[test]
fn a_part_is_continued() {
    let server = Server::start(|_, start| rest(start.unwrap()));
    let place = Place::with_part(&contents()[..70_000]);
    place.fetch(&[&server]).unwrap();
    place.assert_fetched();
    assert_eq!(server.asked(), [Some(70_000)]);
}

#[test]
fn a_complete_part_needs_no_request() {
    let server = Server::start(|_, _| not_found());
    let place = Place::with_part(&contents());
    place.fetch(&[&server]).unwrap();
    place.assert_fetched();
    assert!(server.asked().is_empty());
}

#[test]
fn a_server_that_ignores_ranges_sends_all_again() {
    let server = Server::start(|_, _| whole());
    let place = Place::with_part(&[1; 70_000]);
    place.fetch(&[&server]).unwrap();
    place.assert_fetched();
    assert_eq!(server.asked(), [Some(70_000)]);
}

#[test]
fn a_range_that_is_refused_or_another_one_starts_anew() {
    let refused = || reply("416 Range Not Satisfiable", &[announced(0)], b"");
    for answer in [refused, || rest(0), || reply("206 Partial Content", &[], &contents()[70_000..])] {
        let server = Server::start(move |_, start| if start.is_some() { answer() } else { whole() });
        let place = Place::with_part(&contents()[..70_000]);
        place.fetch(&[&server]).unwrap();
        place.assert_fetched();
        assert_eq!(server.asked(), [Some(70_000), None]);
    }
}

#[test]
fn a_damaged_or_overlong_part_is_dropped() {
    let server = Server::start(|_, start| start.map_or_else(whole, rest));
    for (part, asked) in
        [(vec![1; 70_000], &[Some(70_000), None][..]), (vec![1; SIZE], &[None]), (vec![1; SIZE + 1], &[None])]
    {
        server.asked.lock().unwrap().clear();
        let place = Place::with_part(&part);
        place.fetch(&[&server]).unwrap();
        place.assert_fetched();
        assert_eq!(server.asked(), asked);
    }
}

#[test]
fn the_next_mirror_helps() {
    let wrong = || reply("200 OK", &[announced(SIZE)], &[7; SIZE]);
    let short = || reply("200 OK", &[announced(1_000)], &[7; 1_000]);
    let long = || reply("200 OK", &[], &[7; SIZE + 1]);
    let nothing = || Vec::new();
    for answer in [not_found as fn() -> Reply, wrong, short, long, nothing] {
        let (bad, good) = (Server::start(move |_, _| answer()), Server::start(|_, _| whole()));
        let place = Place::new();
        place.fetch(&[&bad, &good]).unwrap();
        place.assert_fetched();
        assert_eq!((bad.asked().len(), good.asked()), (1, vec![None]));
    }
}

#[test]
fn every_failed_mirror_is_listed_with_its_reason() {
    let servers = [
        Server::start(|_, _| not_found()),
        Server::start(|_, _| reply("200 OK", &[announced(SIZE)], &[7; SIZE])),
        Server::start(|_, _| reply("200 OK", &[announced(SIZE + 1)], &[7; SIZE + 1])),
        Server::start(|_, _| reply("200 OK", &[], &[7; SIZE + 1])),
    ];
    let place = Place::new();
    let error = place.fetch(&servers.each_ref()).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("cannot download file.gz: every mirror failed\n"), "{message}");
    assert!(servers.iter().all(|server| message.contains(&server.mirror())), "{message}");
    let reasons = reasons(Err(error));
    assert_eq!(reasons[0], "HTTP status 404 Not Found");
    assert!(reasons[1].starts_with("expected SHA-256 ") && reasons[1].contains(", found "), "{}", reasons[1]);
    assert_eq!(reasons[2], "expected 200000 bytes, found 200001 announced");
    assert_eq!(reasons[3], "expected 200000 bytes, found more");
    place.assert_empty();
}

#[test]
fn a_connection_cut_in_the_middle_is_resumed() {
    // Announces everything and sends up to the half of what is left, three times.
    let server = Server::start(|number, start| {
        let mut reply = start.map_or_else(whole, rest);
        if number < 3 {
            let left = SIZE - start.unwrap_or(0);
            reply.truncate(reply.len() - left / 2);
        }
        reply
    });
    let place = Place::new();
    place.fetch(&[&server]).unwrap();
    place.assert_fetched();
    assert_eq!(server.asked(), [None, Some(100_000), Some(150_000), Some(175_000)]);
}

#[test]
fn another_mirror_continues_what_one_began() {
    let dying = Server::start(|number, _| {
        if number > 0 {
            return not_found();
        }
        let mut reply = whole();
        reply.truncate(reply.len() - 50_000);
        reply
    });
    let good = Server::start(|_, start| rest(start.unwrap()));
    let place = Place::new();
    place.fetch(&[&dying, &good]).unwrap();
    place.assert_fetched();
    assert_eq!((dying.asked(), good.asked()), (vec![None, Some(150_000)], vec![Some(150_000)]));
}

#[test]
fn a_mirror_that_only_trickles_is_given_up() {
    let server = Server::start(|_, start| {
        let mut reply = start.map_or_else(whole, rest);
        reply.truncate(reply.len() - (SIZE - start.unwrap_or(0)) + 10);
        reply
    });
    let place = Place::new();
    let reasons = reasons(place.fetch(&[&server]));
    assert!(reasons[0].contains("found 80 ("), "{}", reasons[0]);
    assert!(reasons[0].ends_with("; given up after 8 requests"), "{}", reasons[0]);
    assert_eq!(fs::read(place.part()).unwrap(), &contents()[..80]);
}

#[test]
fn silence_and_refusal_end_in_time() {
    // One address accepts (the system does, for the listener) but never answers; nobody listens at the other.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mirrors = [mute.local_addr().unwrap(), nobody].map(|address| format!("http://{address}"));
    let mut options = DownloadOptions::new(mirrors);
    options.read_timeout = Duration::from_millis(300);
    let file = RemoteFile { name: NAME, size: 5, sha256: "" };
    let place = Place::new();
    let began = Instant::now();
    let reasons = reasons(fetch_files(place.0.path(), &[file], &options, &silent));
    assert!(began.elapsed() < Duration::from_secs(20));
    assert!(reasons[0].contains("timeout"), "{}", reasons[0]);
    assert_eq!(reasons.len(), 2);
    place.assert_empty();
}

#[test]
fn cancelling_keeps_the_part() {
    let server = Server::start(|_, start| start.map_or_else(whole, rest));
    let place = Place::with_part(&contents()[..70_000]);
    let stop = |event: ProgressEvent<'_>| {
        assert_eq!((event.stage, event.total), (NAME, Some(SIZE as u64)));
        if event.done < SIZE as u64 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let error = place.fetch_with(&[&server], &stop).unwrap_err();
    assert_eq!(error.to_string(), "cancelled during file.gz");
    assert!(!place.target().exists());
    assert!(place.part().exists());
    place.fetch(&[&server]).unwrap();
    place.assert_fetched();
    assert_eq!(server.asked(), [Some(70_000)]);
}

#[test]
fn progress_runs_from_what_is_there_to_the_end() {
    let server = Server::start(|_, start| start.map_or_else(whole, rest));
    let place = Place::with_part(&contents()[..70_000]);
    let seen = RefCell::new(Vec::new());
    let note = |event: ProgressEvent<'_>| {
        assert_eq!(event.unit, ProgressUnit::Bytes);
        seen.borrow_mut().push(event.done);
        ControlFlow::Continue(())
    };
    place.fetch_with(&[&server], &note).unwrap();
    let seen = seen.into_inner();
    assert_eq!((seen[0], seen[seen.len() - 1]), (70_000, SIZE as u64));
    assert!(seen.is_sorted());
}

#[test]
fn settings_and_folders_that_cannot_be_used_are_named() {
    let place = Place::new();
    assert_eq!(reasons(place.fetch(&[])), Vec::<String>::new());
    let message = place.fetch(&[]).unwrap_err().to_string();
    assert!(message.ends_with("(the list of mirrors is empty)"), "{message}");

    let mut options = DownloadOptions::new(["http://127.0.0.1:9"]);
    options.proxy = Some("not a proxy".to_owned());
    let message = fetch_files(place.0.path(), &[], &options, &silent).unwrap_err().to_string();
    assert!(message.contains("proxy") && message.contains("not a proxy"), "{message}");

    fs::write(place.target(), "a file").unwrap();
    let folder = place.target().join("inside");
    let options = DownloadOptions::new(["http://127.0.0.1:9"]);
    let message = fetch_files(&folder, &[], &options, &silent).unwrap_err().to_string();
    assert!(message.starts_with(&format!("cannot create folder {}: ", folder.display())), "{message}");
}

#[test]
fn content_ranges() {
    for (header, fits) in [
        ("bytes 5-9/10", true),
        ("bytes 5-9/*", true),
        ("bytes 4-9/10", false),
        ("bytes 5-8/10", false),
        ("bytes 5-9/11", false),
        ("bytes 5-18446744073709551615/10", false),
        ("bytes */10", false),
        ("items 5-9/10", false),
        ("", false),
    ] {
        assert_eq!(range_fits(header, 5, 10), fits, "{header:?}");
    }
}

/// A part that leads elsewhere, or is no file, is not written to.
#[cfg(unix)]
#[test]
fn a_planted_part_is_replaced() {
    let plants: [fn(&Path, &Path); 3] = [
        |victim, part| std::os::unix::fs::symlink(victim, part).unwrap(),
        |victim, part| fs::hard_link(victim, part).unwrap(),
        |_, part| assert!(std::process::Command::new("mkfifo").arg(part).status().unwrap().success()),
    ];
    for plant in plants {
        let server = Server::start(|_, start| start.map_or_else(whole, rest));
        let place = Place::new();
        let victim = tempfile::NamedTempFile::new_in(place.0.path()).unwrap();
        fs::write(&victim, &contents()[..70_000]).unwrap();
        plant(victim.path(), &place.0.path().join(format!("{NAME}.part")));
        place.fetch(&[&server]).unwrap();
        assert_eq!(fs::read(place.target()).unwrap(), contents());
        assert_eq!(fs::read(&victim).unwrap(), contents()[..70_000]);
    }
}
