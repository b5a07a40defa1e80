//! Messages of every form.
#![allow(dead_code)]

use wakeline::{Fork, prelude::*, stream::Ticket};

#[derive(Message)]
struct Plain {
    number: u64,
}

#[derive(Message)]
struct Frame {
    number: u64,
    #[envelope]
    pixels: Envelope<u8>,
}

#[derive(Message)]
enum Event {
    Nothing,
    Resized {
        width: u32,
        height: u32,
    },
    Drawn(u8, #[envelope] Frame),
    Both {
        #[envelope]
        left: Frame,
        #[envelope]
        right: Envelope<f32>,
    },
}

#[derive(Message)]
enum Always {
    Drawn(#[envelope] Frame),
}

#[derive(Message)]
enum Never {}

#[derive(Message)]
struct Unit;

#[derive(Message)]
struct Wrap<T, U, const N: usize>(#[envelope] T, U, [u8; N]);

#[derive(Message)]
struct Text<'a>(std::borrow::Cow<'a, str>);

#[derive(Message)]
struct Timed<T>(#[envelope] T, #[event("decoded")] Option<Ticket>);

#[derive(Message)]
enum Step {
    First {
        #[event]
        decoded: Ticket,
    },
    Second(#[event("scaled")] Ticket, #[event("decoded")] Option<Ticket>),
    Third,
}

#[derive(Ports)]
struct TimedPorts<T: Message> {
    #[input(event = "decoded", done, capacity = 2)]
    timed: Input<Timed<T>>,
    #[input(event = "scaled")]
    steps: Inputs<Vec<Option<Box<[Step; 2]>>>>,
}

/// A message that is not `Fork`.
#[derive(Message)]
struct Request(std::sync::mpsc::Receiver<u8>, u64);

#[derive(Message, Clone)]
enum Tree {
    Leaf(u8),
    Node(Box<Tree>, Vec<Tree>),
}

#[derive(Message)]
#[repr(C, packed)]
struct Packed {
    small: u8,
    large: u64,
}

/// Not a message.
#[derive(Clone)]
struct Other(u32);

#[derive(Message, Clone)]
struct Within(String);

#[derive(Message)]
struct Carries<T: Message> {
    text: String,
    numbers: Vec<u64>,
    boxed: Box<[f64]>,
    of_no_message: Vec<Other>,
    shared: std::sync::Arc<[u16]>,
    within: Option<Within>,
    generic: T,
}

#[derive(Message)]
struct List(u64, Option<Box<List>>);

fn is_message<T: Message>() {}

fn forks<T: Fork>() {}

struct Idle;

impl Operator for Idle {
    type Ports = TimedPorts<Frame>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

pub(super) fn main() {
    is_message::<Request>();
    is_message::<Packed>();
    is_message::<Never>();
    is_message::<Unit>();
    is_message::<Text<'static>>();
    is_message::<Always>();

    forks::<Never>();
    forks::<Unit>();
    forks::<Plain>();
    forks::<Tree>();
    forks::<Text<'static>>();
    forks::<Event>();
    forks::<Step>();
    forks::<Wrap<Frame, u8, 3>>();
    forks::<Timed<Vec<Option<Box<[Frame; 2]>>>>>();

    const { assert!(!Plain::CARRIES_ENVELOPES) };
    const { assert!(Frame::CARRIES_ENVELOPES) };
    const { assert!(Event::CARRIES_ENVELOPES) };
    const { assert!(Wrap::<Frame, u8, 3>::CARRIES_ENVELOPES) };
    const { assert!(!Wrap::<Plain, u8, 3>::CARRIES_ENVELOPES) };

    assert_eq!(Timed::<Frame>::EVENTS, ["decoded"]);
    assert_eq!(Step::EVENTS, ["decoded", "scaled"]);
    let mut none = Timed(Plain { number: 1 }, None);
    none.events("decoded", &mut |_| panic!("there are no events"));
    let _ = Flow::new("flow").add("timed", Idle);

    let mut event = Event::Resized { width: 1, height: 2 };
    event.envelopes(&mut |_| panic!("there are no envelopes"));
    assert_eq!(event.size_in_bytes(), size_of::<Event>());

    let text = |bytes: usize| "x".repeat(bytes);
    let carries = Carries {
        text: text(10),
        numbers: vec![0; 100],
        boxed: Box::new([0.0; 10]),
        of_no_message: vec![Other(1); 3],
        shared: std::sync::Arc::from([1_u16, 2, 3]),
        within: Some(Within(text(1000))),
        generic: (text(7), 1_u8),
    };
    assert_eq!(carries.size_in_bytes(), size_of_val(&carries) + 10 + 800 + 80 + 12 + 6 + 1000 + 7);
    let mut list = (0..1_000_000).fold(List(1, None), |list, n| List(n, Some(Box::new(list))));
    assert_eq!(list.size_in_bytes(), 2 * size_of::<List>());
    // Taken apart in a loop: the destructor would recurse a million times.
    while let Some(next) = list.1.take() {
        list = *next;
    }

    let wrapped = Wrap(Plain { number: 1 }, 2_u8, [0; 3]);
    assert_eq!(wrapped.size_in_bytes(), size_of_val(&wrapped) + 8);
}
